"""Images per second of our loader and of a plain DataLoader on torchvision's ImageFolder, in turns.

The same files and the same random transforms: the plain one as torchvision's documentation has it, on the images of
Pillow, and the other way round, on tensors from the beginning. 192 JPEGs of 500 x 375 pixels are made first.

    python benchmarks/image_loader.py [--rounds 5] [--workers 0 1 2]
"""

import argparse
import gc
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import report

from recipes.data.batches import PositionSampler
from recipes.data.draws import DrawnSamples
from recipes.data.image_folder import ImageFolder
from recipes.data.loader_process import SignalProofLoader
from recipes.data.order import ShuffledOrder
from recipes.transform.images import ImageTransform

NUM_CLASSES, NUM_OF_EACH = 8, 24
BATCH = 32
SIZE = 224
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def write_photos(root: Path) -> None:
    """Write JPEGs that are as large as photos of ImageNet: smooth areas, some noise, 60 kB each."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in range(NUM_CLASSES):
        (root / str(label)).mkdir(parents=True)
        for number in range(NUM_OF_EACH):
            coarse = Image.fromarray(rng.integers(256, size=(12, 16, 3), dtype=np.uint8)).resize((500, 375))
            noise = rng.normal(0, 8, size=(375, 500, 3))
            pixels = (np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / str(label) / f"{number}.jpg", quality=90)


def open_ours(root: Path, num_workers: int, *, seed: int = 0) -> Iterable[Any]:
    """Return a loader as training has it, of one epoch; other crops with each seed, as some take longer."""
    transform = ImageTransform(
        model=None,
        in_channels=3,
        num_classes=None,
        size=SIZE,
        eval_size=None,
        crop="resized",
        scale=[0.08, 1.0],
        ratio=[3 / 4, 4 / 3],
        padding=0,
        flip=0.5,
        policy="none",
        num_operations=2,
        magnitude=9,
        color_jitter=0.0,
        extra={},
        erase=0.0,
        erase_with="zeros",
        eval_crop=0.875,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        mixup=0.0,
        cutmix=0.0,
        mix_probability=1.0,
        mix_switch=0.5,
        mix_epochs=None,
        views=1,
    )
    source = ImageFolder(
        path=str(root), val_path=str(root), val_fraction=0.1, transform=transform, on_bad_image="error"
    )
    source.prepare()
    dataset = source.train()
    sampler = PositionSampler(
        ShuffledOrder(len(dataset), seed),
        start_position=0,
        micro_batch_size=BATCH,
        rank=0,
        world_size=1,
        num_micro_batches=len(dataset) // BATCH,
        draws=True,
    )
    drawn: Any = DrawnSamples(dataset, seed)
    return SignalProofLoader(drawn, batch_sampler=sampler, num_workers=num_workers)


def open_plain(root: Path, num_workers: int, *, on_tensors: bool) -> Iterable[Any]:
    """Return torchvision's loader of one epoch."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder as PlainFolder
    from torchvision.transforms import v2

    drawn = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    steps = [v2.ToImage(), *drawn] if on_tensors else [*drawn, v2.ToImage()]
    transform = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    dataset = PlainFolder(str(root), transform=transform)
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=num_workers)


def time_epoch(loader: Iterable[Any]) -> tuple[float, float]:
    """Return seconds per image from the second batch on, and those of processor time of all processes."""
    before = processor_seconds()
    batches = iter(loader)
    num_all = count_images(next(batches))  # its time is that of starting processes
    began, num_images = time.perf_counter(), 0
    for batch in batches:
        num_images += count_images(batch)
    seconds = time.perf_counter() - began
    del batches  # which ends the processes
    gc.collect()
    return seconds / num_images, (processor_seconds() - before) / (num_all + num_images)


def count_images(batch: Any) -> int:
    return len(batch["inputs"] if isinstance(batch, dict) else batch[0])


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "photos"
        write_photos(root)
        seeds = itertools.count()
        loaders: dict[str, Callable[[int], Iterable[Any]]] = {
            "recipes": lambda number: open_ours(root, number, seed=next(seeds)),
            "torchvision": lambda number: open_plain(root, number, on_tensors=False),
            "torchvision on tensors": lambda number: open_plain(root, number, on_tensors=True),
        }
        for num_workers in options.workers:
            found: list[list[tuple[float, float]]] = []
            for _ in range(options.rounds):
                found.append([time_epoch(make(num_workers)) for make in loaders.values()])
            row: dict[str, Any] = {"loader processes": num_workers}
            for place, name in enumerate(loaders):
                row[f"{name}, images/s"] = round(1 / statistics.median(each[place][0] for each in found), 1)
                row[f"{name}, CPU ms"] = round(1e3 * statistics.median(each[place][1] for each in found), 2)
            # of neighbors in time: what else runs on the machine slows both
            for kind, what in enumerate(("speed", "CPU")):
                ratios = (min(plain[kind] for plain in each[1:]) / each[0][kind] for each in found)
                row[f"{what} of ours over the faster"] = round(statistics.median(ratios), 2)
            rows.append(row)
            print(row, flush=True)
    report("image_loader", rows)


if __name__ == "__main__":
    main()
