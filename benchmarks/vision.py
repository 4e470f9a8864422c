"""Measure training on images and tables on sets that packages ship, each beside a control that must fail.

- Letters of six fonts, tested on nine others, with and without augmentation; the control has labels by chance.
- A ViT that has learned the digits 0 to 4, and then 5 to 9 of which 50 are labelled: only its head is trained (a linear
  probe), or all of it with rates that decay by layer. The controls start from weights by chance.
- SimCLR on digits without labels, and a linear probe on its features; the control is a probe on features by chance.
- Two tables beside scikit-learn's own linear models on the same rows.

`python benchmarks/vision.py letters|digits|features|tables` runs one of the parts. Seeds are 1234, 7 and 42.
"""

import csv
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import report

SEEDS = (1234, 7, 42)
NUM_LABELLED = 10  # images of each digit that have a label
VIT = (
    *("model=timm", "model.name=vit_tiny_patch16_224", "model.in_channels=1", "model.image_size=16"),
    "model.arguments={patch_size: 4, embed_dim: 96, depth: 4, num_heads: 3}",
)
GRAY = ("transform.size=16", "transform.mean=[0.5]", "transform.std=[0.5]", "transform.flip=0")
AUGMENTED = ("transform=small_images", "transform.padding=2", *GRAY)
COMMON = ("~callbacks.report", "save_every=null", "eval_samples=null")
LETTERS: dict[str, tuple[str, ...]] = {
    "letters": (),
    "letters, no augmentation": ("transform.crop=none", "transform.policy=none", "transform.erase=0"),
    "letters, labels by chance": ("data.shuffle_labels=true",),
}


def train(folder: Path, overrides: Sequence[str], seed: int) -> dict[str, float]:
    """Train in this process, and return the last row of metrics that has a validation, and minutes."""
    import lightning_recipes as lr

    print(folder.name, f"seed {seed}", *overrides, file=sys.stderr, flush=True)
    folder = folder.with_name(re.sub(r"\W+", "_", folder.name))
    began = time.monotonic()
    lr.compose(*COMMON, *overrides, f"seed={seed}", f"hydra.run.dir={folder}").fit()
    rows = [row for row in lr.read(folder).rows if "val/loss" in row]
    return {**rows[-1], "minutes": (time.monotonic() - began) / 60}


def summarize(run: str, values: Sequence[float], *, measure: str, minutes: float) -> dict[str, str]:
    """Return a row of the result: mean and every seed."""
    each = ", ".join(f"{value:.3f}" for value in values)
    row = {"run": run, "measure": measure, "mean": f"{statistics.mean(values):.3f}", "each seed": each}
    print(row, file=sys.stderr, flush=True)
    return row | {"minutes of a run": f"{minutes:.1f}"}


def over_seeds(run: str, make: Callable[[int], dict[str, float]], *, measure: str = "val/accuracy") -> dict[str, str]:
    """Train with each seed, and return a row of the result."""
    found = [make(seed) for seed in SEEDS]
    minutes = statistics.median(row["minutes"] for row in found)
    return summarize(run, [row[measure] for row in found], measure=measure, minutes=minutes)


def measure_letters(folder: Path) -> list[dict[str, str]]:
    """Return the accuracy on letters of fonts that training never saw."""
    return [
        over_seeds(
            run,
            lambda seed, run=run, typed=typed: train(  # type: ignore[misc]
                folder / f"{run} {seed}", ["recipe=vision_quickstart", *typed, "eval_every=400"], seed
            ),
        )
        for run, typed in LETTERS.items()
    ]


def write_digits(folder: Path) -> dict[str, Path]:
    """Write scikit-learn's digits as image folders, one in five for validation.

    All of them; ten of each class; and both for a half of the classes: all of 0 to 4, ten of each of 5 to 9.
    """
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    count = dict.fromkeys(range(10), 0)
    for index, (image, label) in enumerate(zip(pixels.reshape(-1, 8, 8), labels.tolist(), strict=True)):
        split = "val" if index % 5 == 0 else "train"
        is_few = split == "val" or count[label] < NUM_LABELLED
        count[label] += split == "train"
        sets = ["all", *(["few"] if is_few else [])]
        sets += ["known"] if label < 5 else (["new"] if is_few else [])
        for name in sets:
            place = folder / name / split / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 255 / 16).astype(np.uint8)).save(place / f"{index}.png")
    return {name: folder / name for name in ("all", "few", "known", "new")}


def measure_digits(folder: Path) -> list[dict[str, str]]:
    """Return the accuracy on digits from 5 of a ViT that has learned those below, and 50 labelled images."""
    digits = write_digits(folder)
    length = ["warmup_steps=20", "global_batch_size=50", "log_every=100", "data=image_folder", *VIT, *AUGMENTED]
    bases = {}
    for seed in SEEDS:
        bases[seed] = folder / f"base_{seed}"
        typed = [f"data.path={digits['known']}", "model.num_classes=5", "trainer.max_steps=1000", "optimizer.lr=1e-3"]
        train(bases[seed], [*length, *typed, "eval_every=1000", "save_every=1000", "optimizer.weight_decay=0.05"], seed)
    data = [*length, f"data.path={digits['new']}", "model.num_classes=5", "trainer.max_steps=300", "eval_every=300"]
    probe, whole = ["recipe=linear_probe"], ["recipe=finetune_vision"]
    runs = {
        "linear probe of 0 to 4": (probe, True, ["optimizer.lr=1e-2"]),
        "linear probe of weights by chance": (probe, False, ["optimizer.lr=1e-2"]),
        "fine-tuned from 0 to 4, rates by layer": (whole, True, ["optimizer.lr=1e-3"]),
        "all from weights by chance": (whole, False, ["optimizer.lr=1e-3", "optimizer.layer_decay=null"]),
    }

    def run(name: str, seed: int) -> dict[str, float]:
        recipe, starts, tuned = runs[name]
        start = [f"start_from={bases[seed]}"] if starts else []
        return train(folder / f"{name} {seed}", [*recipe, *data, *tuned, *start], seed)

    return [over_seeds(name, lambda seed, name=name: run(name, seed)) for name in runs]  # type: ignore[misc]


def measure_features(folder: Path) -> list[dict[str, str]]:
    """Return the accuracy of a linear probe on features of SimCLR, with 100 labelled digits."""
    digits = write_digits(folder)
    model = ["model=timm", "model.name=resnet10t", "model.in_channels=1"]
    length = ["trainer.max_steps=200", "warmup_steps=20", "eval_every=200", "log_every=50"]
    bases = {}
    for seed in SEEDS:
        bases[seed] = folder / f"simclr_{seed}"
        typed = ["recipe=simclr", *model, f"data.path={digits['all']}", *GRAY, "transform.scale=[0.4,1]"]
        sizes = ["global_batch_size=256", "micro_batch_size=128", "optimizer.lr=1e-3", "save_every=200"]
        train(bases[seed], [*typed, *length, *sizes], seed)
    few = [*model, "model.num_classes=10", "data=image_folder", f"data.path={digits['few']}", *AUGMENTED]

    def run(name: str, seed: int, start: Sequence[str]) -> dict[str, float]:
        typed = ["recipe=linear_probe", *few, *length, "global_batch_size=50", "optimizer.lr=1e-2", *start]
        return train(folder / f"{name} {seed}", typed, seed)

    names = ("digits, linear probe of SimCLR's features", "digits, linear probe of features by chance")
    return [
        over_seeds(names[0], lambda seed: run("probe", seed, [f"start_from={bases[seed]}"])),
        over_seeds(names[1], lambda seed: run("chance", seed, [])),
    ]


def write_table(path: Path, inputs: Any, targets: Any, names: Sequence[str]) -> Path:
    """Write rows of a table with a column for each input, and `target`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "target"])
        writer.writerows([*map(repr, map(float, row)), target] for row, target in zip(inputs, targets, strict=True))
    return path


def measure_tables(folder: Path) -> list[dict[str, str]]:
    """Return R2 of diabetes and accuracy of breast cancer, ours and scikit-learn's, on the same held-out rows."""
    from sklearn.datasets import load_breast_cancer, load_diabetes
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows = []
    regression = ["recipe=regression", "loss.center=152", "loss.scale=77"]
    classes = ["recipe=regression", "task=classification", "data.target_kind=classes", "model.num_classes=2"]
    sets = {
        "diabetes": (load_diabetes(), regression, "val/r2", LinearRegression()),
        "breast cancer": (load_breast_cancer(), [*classes, "loss=bce"], "val/accuracy", LogisticRegression()),
    }
    for name, (loaded, recipe, measure, peer) in sets.items():
        is_val = np.arange(len(loaded.target)) % 5 == 0
        targets = loaded.target.astype(float if measure == "val/r2" else int)
        by_chance = np.random.default_rng(0).permutation(targets[~is_val])
        columns = [str(column).replace(" ", "_") for column in loaded.feature_names]
        parts = {"train": (~is_val, targets[~is_val]), "val": (is_val, targets[is_val]), "chance": (~is_val, by_chance)}
        files = {
            part: write_table(folder / f"{name} {part}.csv", loaded.data[chosen], of_part.tolist(), columns)
            for part, (chosen, of_part) in parts.items()
        }
        fitted = make_pipeline(StandardScaler(), peer).fit(loaded.data[~is_val], targets[~is_val])
        score = float(fitted.score(loaded.data[is_val], targets[is_val]))
        rows.append(summarize(f"{name}, scikit-learn's {type(peer).__name__}", [score], measure=measure, minutes=0.0))
        typed = [*recipe, f"model.num_inputs={len(columns)}", f"data.val_path={files['val']}", "eval_every=500"]
        linear, wide = ["model.hidden_sizes=[]", "optimizer.lr=1e-2"], ["model.hidden_sizes=[64]"]
        variants = {
            "linear": ("train", linear),
            "one hidden layer": ("train", wide),
            "one hidden layer, targets by chance": ("chance", wide),
        }
        for label, (part, more) in variants.items():
            all_typed = [*typed, f"data.path={files[part]}", *more]
            rows.append(
                over_seeds(
                    f"{name}, {label}",
                    lambda seed, label=f"{name} {label}", all_typed=all_typed: train(  # type: ignore[misc]
                        folder / f"{label} {seed}", all_typed, seed
                    ),
                    measure=measure,
                )
            )
    return rows


PARTS: dict[str, Callable[[Path], list[dict[str, str]]]] = {
    "letters": measure_letters,
    "digits": measure_digits,
    "features": measure_features,
    "tables": measure_tables,
}


def main() -> None:
    for part in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as name:
            rows = PARTS[part](Path(name))
        report(f"vision_{part}", rows, command=f"python benchmarks/vision.py {part}")


if __name__ == "__main__":
    main()
