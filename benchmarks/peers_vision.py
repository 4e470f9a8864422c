"""A recipe's step on images compared with a plain PyTorch loop and a loop in the manner of timm's train.py.

Same model, initial weights, batch, optimizer, learning-rate schedule and clipping, on images in memory, one thread. The
recipe keeps its default callbacks, metric logging and progress line; the loops log a line every ten steps. Each step of
a loop runs before a step of the recipe in the same process, and what is measured is the processor time of all its
threads, so that neither drift of the machine nor other work on it counts. `… formats` measures memory formats of images
and weights in the same way, of a plain loop.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from measure import build_run, in_turn, report, run_in_turn  # isort: skip  # it imports Lightning behind recipes

import torch
import torch.nn.functional as F
from timm import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.utils import AverageMeter, accuracy, dispatch_clip_grad
from torch import Tensor, nn

NUM_STEPS, SKIP, ROUNDS = 24, 6, 1
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.05
# model in timm, image size, images per step
CASES = (("resnet18", 64, 16), ("convnext_atto", 64, 16), ("vit_tiny_patch16_224", 224, 4))
NUM_CLASSES = 100
Step = Callable[[], object]


def overrides(name: str, size: int, batch: int) -> list[str]:
    """Return a run without saving and evaluation, which leaves only the per-step cost."""
    return [
        *("recipe=single_fp32", "model=timm", f"model.name={name}", f"model.num_classes={NUM_CLASSES}"),
        *("data=random_images", f"data.image_size={size}", f"global_batch_size={batch}", "metrics=classification"),
        *(f"optimizer.lr={LEARNING_RATE}", f"optimizer.weight_decay={WEIGHT_DECAY}", "compile=false"),
        *(
            f"trainer.max_steps={NUM_STEPS + SKIP}",
            "eval_every=10000",
            "save_every=null",
            "eval_samples=1",
            "warmup_steps=1",
        ),
        *("trainer.accelerator=cpu", "trainer.devices=1"),
    ]


def read_batches(typed: list[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and classes of a run, without end."""
    run = build_run(typed)
    run.data.trainer = run.trainer
    while True:
        for batch in run.data.train_dataloader():
            yield batch["inputs"], batch["targets"]


def make_model(name: str, size: int) -> nn.Module:
    """Return the model of timm alone."""
    torch.manual_seed(0)
    model: nn.Module = create_model(name, num_classes=NUM_CLASSES, **({"img_size": size} if "vit" in name else {}))
    return model.train()


def plain_loop(name: str, size: int, batches: Iterator[tuple[Tensor, Tensor]]) -> Step:
    """Return a step of PyTorch's own parts."""
    model = make_model(name, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS + SKIP)
    number = 0

    def step() -> None:
        nonlocal number
        images, classes = next(batches)
        loss = F.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        number += 1
        if number % 10 == 0:
            print(f"{number} {loss.item():.4f}", file=sys.stderr)

    return step


def timm_loop(name: str, size: int, batches: Iterator[tuple[Tensor, Tensor]]) -> Step:
    """Return a step of timm's parts, in the order of its train.py: channels last, without mixup, in float32."""
    model = make_model(name, size).to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    scheduler = CosineLRScheduler(optimizer, t_initial=NUM_STEPS + SKIP, t_in_epochs=False)
    criterion, losses, correct = nn.CrossEntropyLoss(), AverageMeter(), AverageMeter()
    number = 0

    def step() -> None:
        nonlocal number
        images, classes = next(batches)
        output = model(images.contiguous(memory_format=torch.channels_last))
        loss = criterion(output, classes)
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        scheduler.step_update(num_updates=number)
        if number % 10 == 0:
            losses.update(loss.item(), len(images))
            correct.update(accuracy(output.detach(), classes)[0].item(), len(images))
            print(f"{number} {losses.val:.4f} {correct.val:.1f}", file=sys.stderr)

    return step


def compare_peers() -> list[dict[str, Any]]:
    """Return a row per model and peer."""
    rows = []
    for name, size, batch in CASES:
        typed = overrides(name, size, batch)
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in in_turn(ROUNDS):
            for peer, make in (("PyTorch loop", plain_loop), ("timm's train.py", timm_loop)):
                ours, theirs = run_in_turn(
                    typed, make(name, size, read_batches(typed)), skip=SKIP, clock=time.process_time
                )
                found.setdefault(peer, []).append((statistics.median(ours), statistics.median(theirs)))
        for peer, medians in found.items():
            ours, theirs = (statistics.median(each) for each in zip(*medians, strict=True))
            rows.append(
                {
                    "model": f"{name}, {batch} x {size} px",
                    "peer": peer,
                    "recipe, ms": f"{1e3 * ours:.1f}",
                    "peer, ms": f"{1e3 * theirs:.1f}",
                    "peer / recipe": f"{statistics.median(b / a for a, b in medians):.2f}",
                }
            )
            print(rows[-1], file=sys.stderr)
    return rows


def format_loop(
    name: str,
    size: int,
    batches: Iterator[tuple[Tensor, Tensor]],
    *,
    images: torch.memory_format,
    weights: torch.memory_format,
) -> Step:
    """Return a step of a plain loop with images and weights in memory formats."""
    model = make_model(name, size).to(memory_format=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> None:
        inputs, classes = next(batches)
        F.cross_entropy(model(inputs.contiguous(memory_format=images)), classes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


FIRST, LAST = torch.contiguous_format, torch.channels_last
FORMATS: dict[str, dict[str, torch.memory_format]] = {
    "channels first": {"images": FIRST, "weights": FIRST},
    "images last": {"images": LAST, "weights": FIRST},
    "images and weights last": {"images": LAST, "weights": LAST},
}


def compare_formats() -> list[dict[str, Any]]:
    """Return a row per model, with the milliseconds of each format; all take turns step by step."""
    rows = []
    for name, size, batch in CASES:
        batches = read_batches(overrides(name, size, batch))
        steps = {label: format_loop(name, size, batches, **settings) for label, settings in FORMATS.items()}
        seconds = time_in_turn(steps)
        rows.append(
            {"model": f"{name}, {batch} x {size} px"}
            | {f"{label}, ms": f"{1e3 * statistics.median(each):.1f}" for label, each in seconds.items()}
        )
        print(rows[-1], file=sys.stderr)
    return rows


def time_in_turn(steps: dict[str, Step]) -> dict[str, list[float]]:
    """Return the seconds of the steps of each loop, which take turns step by step."""
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    for number in range(NUM_STEPS // 2 + SKIP):
        for label, step in steps.items():
            began = time.process_time()
            step()
            if number >= SKIP:
                seconds[label].append(time.process_time() - began)
    return seconds


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["formats"]:
        report("vision_formats", compare_formats(), command="python benchmarks/peers_vision.py formats")
    else:
        report("peers_vision", compare_peers())


if __name__ == "__main__":
    main()
