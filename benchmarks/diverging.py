"""Train at a diverging learning rate of 3, with and without LossSpikeRollback; plot docs/assets/diverging.png.

`python benchmarks/diverging.py <folder without> <folder with>` plots two existing runs.
"""

import csv
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from measure import report

ROOT = Path(__file__).parents[1]
OVERRIDES = [
    "model=gpt2_nano",
    "optimizer=sgd",
    "optimizer.lr=3",
    "trainer.gradient_clip_val=null",
    "~callbacks.sample_text",
]


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:]]
    if not folders:
        parent = Path(tempfile.mkdtemp(prefix="diverging_"))
        folders = [parent / "without", parent / "with"]
        for folder, more in zip(folders, (["~callbacks.loss_spike"], []), strict=True):
            command = [sys.executable, "train.py", *OVERRIDES, *more, f"hydra.run.dir={folder}"]
            subprocess.run(command, cwd=ROOT, check=False)
    _draw(folders)
    report("diverging", [_row(*pair) for pair in zip(("without", "with"), folders, strict=True)])


def _row(name: str, folder: Path) -> dict[str, Any]:
    rows = _rows(folder / "metrics.csv")
    finite = [loss for _, loss in rows if math.isfinite(loss)]
    validated = [row["val/loss"] for row in _read(folder / "metrics.csv") if row.get("val/loss")]
    last = _read(folder / "metrics.csv")[-1]
    return {
        "callbacks.loss_spike": name,
        "steps": rows[-1][0],
        "last train/loss": f"{rows[-1][1]:.3f}",
        "largest train/loss": f"{max(finite):.4g}",
        "val/loss": f"{float(validated[-1]):.3f}",
        "skipped steps": last.get("spike/skipped_steps", ""),
        "rollbacks": last.get("spike/rollbacks", ""),
    }


def _draw(folders: list[Path]) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    without, with_it = (_rows(folder / "metrics.csv") for folder in folders)
    finite = [(step, loss) for step, loss in without if math.isfinite(loss)]
    axes.plot(*zip(*finite, strict=True), color="#c0392b", lw=1.2, label="without LossSpikeRollback")
    if len(finite) < len(without):
        step, loss = finite[-1]
        axes.plot(step, loss, "x", color="#c0392b")
        axes.annotate(f"NaN from step {step + 1}", (step, loss), (step + 10, loss), color="#c0392b")
    rolled_back = sorted((folders[1] / "rolled_back").glob("*.csv"))
    for number, path in enumerate(rolled_back):
        kept = [(step, loss) for step, loss in _rows(path) if math.isfinite(loss)]
        label = "rolled-back steps" if number == 0 else None
        if kept:
            axes.plot(*zip(*kept, strict=True), color="#7f8c8d", lw=0.8, alpha=0.7, label=label)
    axes.plot(*zip(*with_it, strict=True), color="#2471a3", lw=1.2, label="with it")
    axes.set(xlabel="optimizer step", ylabel="train/loss", yscale="log", ylim=(4, 1e5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs/assets/diverging.png", dpi=120)


def _rows(path: Path) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row["train/loss"] or "nan")) for row in _read(path)]


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
