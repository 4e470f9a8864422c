"""Measure what each preference loss teaches: of two orders of letters that a model answers at random, prefer one.

A model learns to answer `ord:cabd>` with its letters in ascending or descending order, at random. Pairs then prefer the
ascending one. Prompts are held out by a hash; an answer is right if all of it is. The control has the labels of all
pairs flipped.
"""

import hashlib
import json
import random
import string
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import report

SEEDS = (1234, 7)
NUM_WORDS = 30_000
SFT_STEPS = 900
COMMON = (
    *("tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=32", "eval_samples=300"),
    *("callbacks.generation_eval.num_samples=300", "~callbacks.report"),
)
TUNED = (
    "optimizer.lr=2e-5",
    "scheduler=constant",
    "warmup_steps=0",
    "trainer.max_steps=60",
    "eval_every=10",
    "save_every=null",
)
# what a row shows -> overrides
RUNS: dict[str, tuple[str, ...]] = {
    "dpo": ("recipe=dpo",),
    "dpo, nll_weight=1": ("recipe=dpo", "loss.nll_weight=1"),
    "dpo, flipped labels": ("recipe=dpo", "data.path={flipped}"),
    "ipo": ("recipe=dpo", "loss.kind=ipo"),
    "orpo": ("recipe=orpo", "optimizer.lr=1e-4"),
    "simpo": ("recipe=simpo",),
    "kto": ("recipe=kto",),
}


def write_rows(folder: Path, seed: int) -> dict[str, Path]:
    """Write the rows of all stages, each prompt in one split of all of them."""
    rng = random.Random(seed)
    rows: dict[str, list[dict[str, str]]] = {"sft": [], "pairs": [], "flipped": [], "held_out": []}
    words = {"".join(rng.sample(string.ascii_lowercase, rng.choice((3, 4, 5)))) for _ in range(NUM_WORDS)}
    for word in sorted(words):
        prompt, up = f"ord:{word}>", "".join(sorted(word))
        pair = {"prompt": prompt, "chosen": up, "rejected": up[::-1]}
        if hashlib.sha256(prompt.encode()).digest()[0] < 26:  # one in ten
            rows["held_out"].append(pair)
            continue
        rows["sft"].append({"prompt": prompt, "completion": up if rng.random() < 0.5 else up[::-1]})
        rows["pairs"].append(pair)
        rows["flipped"].append({"prompt": prompt, "chosen": up[::-1], "rejected": up})
    for name, of_file in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))
    return {name: folder / f"{name}.jsonl" for name in rows}


def train(folder: Path, overrides: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Train in this process and return the rows of metrics that have validations."""
    import lightning_recipes as lr

    cache = (f"data.cache_dir={folder.parent / 'cache'}",)
    run = lr.compose(*overrides, *COMMON, *cache, f"seed={seed}", f"hydra.run.dir={folder}")
    run.fit()
    return [row for row in lr.read(folder).rows if row.get("val/loss") is not None]


def measure(seed: int) -> list[dict[str, Any]]:
    """Return the result rows of one seed."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_rows(folder, seed)
        base = folder / "base"
        sft = (
            "recipe=sft",
            f"data.path={files['sft']}",
            "optimizer.lr=1e-3",
            "global_batch_size=64",
            "data.packing=false",
        )
        train(base, [*sft, f"trainer.max_steps={SFT_STEPS}", "eval_every=900", "save_every=900"], seed)
        for label, overrides in {"start": ("recipe=dpo", "optimizer.lr=1e-12", "trainer.max_steps=1"), **RUNS}.items():
            print(f"{label}, seed {seed}", file=sys.stderr, flush=True)
            typed = [override.format(**files) for override in overrides]
            names = {override.partition("=")[0] for override in typed}
            given = [f"data.path={files['pairs']}", f"data.val_path={files['held_out']}", *TUNED]
            kept = [override for override in given if override.partition("=")[0] not in names]
            number = len(found)
            task = f"task.cache_dir={folder / 'cache'}"
            rows = train(folder / f"run_{number}", [*typed, *kept, f"start_from={base}", task], seed)
            right = {int(row["step"]): float(row["val/exact_match"]) for row in rows}
            best = max(right, key=lambda step: (right[step], -step))
            last = max(right)
            found.append(
                {
                    "loss": label,
                    "seed": seed,
                    "held-out ascending answers, best": f"{right[best]:.3f}",
                    "at step": best,
                    "after the last step": f"{right[last]:.3f}",
                    "chosen log-probability, first": f"{float(rows[0].get('val/chosen_log_prob', 'nan')):.2f}",
                    "last": f"{float(rows[-1].get('val/chosen_log_prob', 'nan')):.2f}",
                }
            )
    return found


def main() -> None:
    report("preferences", [row for seed in SEEDS for row in measure(seed)])


if __name__ == "__main__":
    main()
