"""Measure CLIP and SigLIP on pictures of words, and of shapes: which caption belongs to a picture.

It is one of 256 words that were never trained on; or one of 512 scenes, each with a color, form and place that were
never together in training, which is also looked for among the captions of all 58,848 scenes there are. A control is
trained with the captions of other pictures. `python benchmarks/image_text.py` trains each with two seeds; names of runs
may be typed, and the rows of others stay in the result.
"""

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import RESULTS, report  # isort: skip: before torch

import torch
import torch.nn.functional as F

from recipes.config.instantiate import make
from recipes.data.shapes import choose_unseen, list_scenes, write_caption

SEEDS = (1234, 7)
WORDS, SCENES = "recipe=clip_quickstart", "recipe=clip_scenes"
STEPS = {WORDS: 900, SCENES: 600}
RUNS: dict[str, tuple[str, ...]] = {
    "clip": (WORDS,),
    "siglip": (WORDS, "loss=siglip", "model.init_scale=10", "model.init_bias=-10"),
    "clip, captions of others": (WORDS, "data.shuffle_captions=true"),
    "scenes": (SCENES,),
    "scenes, captions of others": (SCENES, "data.shuffle_captions=true"),
}
AMONG_ALL = "image_to_caption_recall_1_among_all"
MEASURES = ("image_to_caption_recall_1", "caption_to_image_recall_1", "image_to_caption_recall_10", AMONG_ALL)
BATCH = 512


def train(run: str, folder: Path, seed: int) -> dict[str, float]:
    """Train in this process, and return the last row of metrics that has a validation, and minutes."""
    import lightning_recipes as lr

    print(run, f"seed {seed}", file=sys.stderr, flush=True)
    place = folder / re.sub(r"\W+", "_", f"{run} {seed}")
    began = time.monotonic()
    recipe = RUNS[run][0]
    own = ("~callbacks.report", f"save_every={STEPS[recipe]}", f"eval_every={STEPS[recipe]}")
    trained = lr.compose(*RUNS[run], *own, f"seed={seed}", f"hydra.run.dir={place}").fit()
    minutes = (time.monotonic() - began) / 60
    found = {f"val/{AMONG_ALL}": find_among_all(trained)} if recipe == SCENES else {}
    rows = [row for row in lr.read(place).rows if "val/loss" in row]
    return {**rows[-1], **found, "minutes": minutes}


@torch.no_grad()
def find_among_all(run: Any) -> float:
    """Return the fraction of the pictures of the validation whose nearest caption, of all scenes, is their own."""
    model, source = run.load(), make(run.config["data"])
    source.prepare(model.tokenizer)
    captions = [*map(write_caption, list_scenes())]
    encoded = [torch.stack(each) for each in zip(*map(source.encode_caption, captions), strict=True)]  # [K, T] each
    parts = zip(*(each.split(BATCH) for each in encoded), strict=True)
    keys = torch.cat([F.normalize(model(None, *part)[1], dim=-1) for part in parts])  # [K, F]
    pairs = source.val()
    images = torch.stack([pairs[index]["inputs"] for index in range(len(pairs))])  # [N, C, S, S]
    nearest = (model(images, None, None)[0] @ keys.T).argmax(dim=1).tolist()  # [N]
    own = map(write_caption, choose_unseen(len(pairs)))
    is_own = [captions[key] == caption for key, caption in zip(nearest, own, strict=True)]
    return sum(is_own) / len(is_own)


def measure(run: str, folder: Path) -> dict[str, str]:
    """Return a row of the result: the mean of each measure, and of recall at 1 every seed."""
    found = [train(run, folder, seed) for seed in SEEDS]
    row = {"run": run}
    for name in MEASURES:
        values = [each[f"val/{name}"] for each in found if f"val/{name}" in each]
        shown = ", ".join(f"{value:.3f}" for value in values)
        row[name] = f"{statistics.mean(values):.3f} ({shown})" if values else ""
    return row | {"minutes of a run": f"{statistics.median(each['minutes'] for each in found):.1f}"}


def main(runs: Sequence[str]) -> None:
    file = RESULTS / "image_text.json"
    with tempfile.TemporaryDirectory() as folder:
        new = [measure(run, Path(folder)) for run in runs or RUNS]
    # after the runs: other ones may have been measured beside them
    earlier = json.loads(file.read_text(encoding="utf-8"))["rows"] if runs and file.is_file() else []
    kept = [dict.fromkeys(new[0], "") | row for row in earlier if row["run"] not in {each["run"] for each in new}]
    order = [*RUNS]
    rows = sorted([*kept, *new], key=lambda row: order.index(row["run"]))
    report("image_text", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
