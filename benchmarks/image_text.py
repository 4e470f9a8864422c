"""Measure CLIP and SigLIP on pictures of words: which of 256 words that were never trained on is in a picture.

The control is trained with the captions of other pictures. `python benchmarks/image_text.py` trains each with two
seeds; names of runs may be typed, and the rows of others stay in the result.
"""

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measure import RESULTS, report

SEEDS = (1234, 7)
RUNS: dict[str, tuple[str, ...]] = {
    "clip": (),
    "siglip": ("loss=siglip", "model.init_scale=10", "model.init_bias=-10"),
    "clip, captions of others": ("data.shuffle_captions=true",),
}
MEASURES = ("image_to_caption_recall_1", "caption_to_image_recall_1", "image_to_caption_recall_10")


def train(run: str, folder: Path, seed: int) -> dict[str, float]:
    """Train in this process, and return the last row of metrics that has a validation, and minutes."""
    import lightning_recipes as lr

    print(run, f"seed {seed}", file=sys.stderr, flush=True)
    place = folder / re.sub(r"\W+", "_", f"{run} {seed}")
    began = time.monotonic()
    own = ("recipe=clip_quickstart", "~callbacks.report", "save_every=null", "eval_every=900")
    lr.compose(*own, *RUNS[run], f"seed={seed}", f"hydra.run.dir={place}").fit()
    rows = [row for row in lr.read(place).rows if "val/loss" in row]
    return {**rows[-1], "minutes": (time.monotonic() - began) / 60}


def measure(run: str, folder: Path) -> dict[str, str]:
    """Return a row of the result: the mean of each measure, and of recall at 1 every seed."""
    found = [train(run, folder, seed) for seed in SEEDS]
    row = {"run": run}
    for name in MEASURES:
        values = [each[f"val/{name}"] for each in found]
        row[name] = f"{statistics.mean(values):.3f}" + (f" ({', '.join(f'{value:.3f}' for value in values)})")
    return row | {"minutes of a run": f"{statistics.median(each['minutes'] for each in found):.1f}"}


def main(runs: Sequence[str]) -> None:
    file = RESULTS / "image_text.json"
    earlier = json.loads(file.read_text(encoding="utf-8"))["rows"] if runs and file.is_file() else []
    with tempfile.TemporaryDirectory() as folder:
        new = [measure(run, Path(folder)) for run in runs or RUNS]
    kept = [row for row in earlier if row["run"] not in {each["run"] for each in new}]
    order = [*RUNS]
    rows = sorted([*kept, *new], key=lambda row: order.index(row["run"]))
    report("image_text", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
