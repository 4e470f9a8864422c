"""Measure what each preference loss teaches: of two orders of letters that a model answers at random, prefer one.

A model learns to answer `ord:cabd>` with its letters in ascending or descending order, at random. Pairs then prefer the
ascending one. Prompts are held out by a hash; an answer is right if all of it is. The control has the labels of all
pairs flipped.

`python benchmarks/preferences.py rewards` measures a reward model on the same pairs: in how many of those held out the
ascending answer has the higher score. The control has labels by chance, in the held-out pairs, too.

`python benchmarks/preferences.py format <GGUF file>` prefers, with a published chat model and LoRA, JSON to a sentence.
The file is that of `benchmarks/adapters.py`.
"""

import hashlib
import json
import random
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters import FRUITS, convert_gguf
from measure import report

SEEDS = (1234, 7)
NUM_WORDS = 30_000
SFT_STEPS = 900
COMMON = ("tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=32", "~callbacks.report")
ANSWERED = ("eval_samples=300", "callbacks.generation_eval.num_samples=300")
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
REWARDS: dict[str, tuple[str, ...]] = {
    "start": ("optimizer.lr=1e-12", "trainer.max_steps=1"),
    "reward model": (),
    "reward model, labels by chance": ("data.path={random}", "data.val_path={random_held_out}"),
}
TAUGHT = ("optimizer.lr=5e-4", "trainer.max_steps=24", "warmup_steps=4", "eval_every=24")
FORMAT: dict[str, tuple[str, ...]] = {
    "start": ("optimizer.lr=1e-12", "trainer.max_steps=1", "warmup_steps=0", "eval_every=1"),
    "dpo": TAUGHT,
    "dpo, nll_weight=1": (*TAUGHT, "loss.nll_weight=1"),
}
TUNED_FORMAT = (
    *("recipe=dpo", "model=huggingface", "model.max_seq_len=128", "seq_len=128", "adapter=lora", "adapter.r=8"),
    *("data.val_fraction=0.15", "global_batch_size=4", "micro_batch_size=2", "save_every=null", "~callbacks.report"),
    *("eval_samples=20", "callbacks.generation_eval.num_samples=20"),
)
NUM_REWARDED = 1000  # held-out pairs: chance is 0.5 with a standard deviation of 0.016


def write_rows(folder: Path, seed: int) -> dict[str, Path]:
    """Write the rows of all stages, each prompt in one split of all of them."""
    rng = random.Random(seed)
    names = ("sft", "pairs", "flipped", "random", "held_out", "random_held_out")
    rows: dict[str, list[dict[str, str]]] = {name: [] for name in names}
    words = {"".join(rng.sample(string.ascii_lowercase, rng.choice((3, 4, 5)))) for _ in range(NUM_WORDS)}
    for word in sorted(words):
        prompt, up = f"ord:{word}>", "".join(sorted(word))
        pair = {"prompt": prompt, "chosen": up, "rejected": up[::-1]}
        flipped = {"prompt": prompt, "chosen": up[::-1], "rejected": up}
        by_chance = random.Random(f"{seed} {word}").choice((pair, flipped))  # leaves the draws of the other rows
        if hashlib.sha256(prompt.encode()).digest()[0] < 26:  # one in ten
            rows["held_out"].append(pair)
            rows["random_held_out"].append(by_chance)
            continue
        rows["sft"].append({"prompt": prompt, "completion": up if rng.random() < 0.5 else up[::-1]})
        rows["pairs"].append(pair)
        rows["flipped"].append(flipped)
        rows["random"].append(by_chance)
    for name, of_file in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))
    return {name: folder / f"{name}.jsonl" for name in rows}


def train(folder: Path, overrides: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Train in this process and return the rows of metrics that have validations."""
    import lightning_recipes as lr

    run = lr.compose(*overrides, f"data.cache_dir={folder.parent / 'cache'}", f"seed={seed}", f"hydra.run.dir={folder}")
    run.fit()
    return [row for row in lr.read(folder).rows if row.get("val/loss") is not None]


def train_base(folder: Path, rows: Path, seed: int) -> Path:
    """Train the model that answers in either order, and return its run folder."""
    typed = ["recipe=sft", f"data.path={rows}", "optimizer.lr=1e-3", "global_batch_size=64", "data.packing=false"]
    lengths = [f"trainer.max_steps={SFT_STEPS}", f"eval_every={SFT_STEPS}", f"save_every={SFT_STEPS}"]
    train(folder, [*typed, *lengths, *COMMON, *ANSWERED], seed)
    return folder


def fill(overrides: Sequence[str], defaults: Sequence[str], files: dict[str, Path]) -> list[str]:
    """Return overrides with the names of files, and the defaults that they leave."""
    typed = [override.format(**files) for override in overrides]
    names = {override.partition("=")[0] for override in typed}
    given = [f"data.path={files['pairs']}", f"data.val_path={files['held_out']}", *TUNED, *COMMON, *defaults]
    return [*typed, *(override for override in given if override.partition("=")[0] not in names)]


def find_best(rows: list[dict[str, Any]], name: str) -> tuple[dict[int, float], int]:
    """Return a metric by step, and the first step of its highest value."""
    found = {int(row["step"]): float(row[name]) for row in rows}
    return found, max(found, key=lambda step: (found[step], -step))


def measure_losses(seed: int) -> list[dict[str, Any]]:
    """Return the result rows of the losses for one seed."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_rows(folder, seed)
        base = train_base(folder / "base", files["sft"], seed)
        for label, overrides in {"start": ("recipe=dpo", "optimizer.lr=1e-12", "trainer.max_steps=1"), **RUNS}.items():
            print(f"{label}, seed {seed}", file=sys.stderr, flush=True)
            defaults = (f"start_from={base}", f"task.cache_dir={folder / 'cache'}", *ANSWERED)
            typed = fill(overrides, defaults, files)
            rows = train(folder / f"run_{len(found)}", typed, seed)
            right, best = find_best(rows, "val/exact_match")
            found.append(
                {
                    "loss": label,
                    "seed": seed,
                    "held-out ascending answers, best": f"{right[best]:.3f}",
                    "at step": best,
                    "after the last step": f"{right[max(right)]:.3f}",
                    "chosen log-probability, first": f"{float(rows[0].get('val/chosen_log_prob', 'nan')):.2f}",
                    "last": f"{float(rows[-1].get('val/chosen_log_prob', 'nan')):.2f}",
                }
            )
    return found


def write_format_pairs(path: Path) -> Path:
    """Write 400 pairs: of an answer in JSON and the same in a sentence, prefer the first."""
    rng = random.Random(0)
    rows = []
    for _ in range(400):
        first, second = rng.sample(FRUITS, 2)
        number, other = rng.randrange(2, 90), rng.randrange(2, 90)
        question = f"{number} {first} and {other} {second}"
        answers = {"chosen": json.dumps({first: number, second: other}), "rejected": f"You have {question}."}
        row = {"prompt": [{"role": "user", "content": question}]}
        rows.append(row | {name: [{"role": "assistant", "content": text}] for name, text in answers.items()})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measure_format(gguf: Path) -> list[dict[str, Any]]:
    """Return the result rows of a published chat model."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert_gguf(gguf, folder / "model")
        pairs = write_format_pairs(folder / "pairs.jsonl")
        for label, overrides in FORMAT.items():
            print(label, file=sys.stderr, flush=True)
            run, began = folder / f"run_{len(found)}", time.monotonic()
            files = (f"model.name={folder / 'model'}", f"data.path={pairs}")
            (row,) = train(run, [*overrides, *TUNED_FORMAT, *files], SEEDS[0])
            found.append(
                {
                    "run": label,
                    "steps": int(row["step"]),
                    "held-out pairs preferred": f"{row['val/accuracy']:.2f}",
                    "exact match": f"{row['val/exact_match']:.2f}",
                    "reward margin": f"{row['val/margin']:.2f}",
                    "chosen log-probability": f"{row['val/chosen_log_prob']:.2f}",
                    "rejected": f"{row['val/rejected_log_prob']:.2f}",
                    "total, s": f"{time.monotonic() - began:.0f}",
                }
            )
    return found


def measure_rewards(seed: int) -> list[dict[str, Any]]:
    """Return the result rows of reward models for one seed."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_rows(folder, seed)
        base = train_base(folder / "base", files["sft"], seed)
        for label, overrides in REWARDS.items():
            print(f"{label}, seed {seed}", file=sys.stderr, flush=True)
            defaults = ("recipe=reward_model", f"start_from={base}", f"eval_samples={NUM_REWARDED}")
            rows = train(folder / f"run_{len(found)}", fill(overrides, defaults, files), seed)
            right, best = find_best(rows, "val/accuracy")
            found.append(
                {
                    "run": label,
                    "seed": seed,
                    "held-out pairs scored in order, best": f"{right[best]:.3f}",
                    "at step": best,
                    "after the last step": f"{right[max(right)]:.3f}",
                    "margin, last": f"{float(rows[-1]['val/margin']):.2f}",
                }
            )
    return found


def main() -> None:
    if sys.argv[1:] == ["rewards"]:
        rows = [row for seed in SEEDS for row in measure_rewards(seed)]
        report("preferences_rewards", rows, command="python benchmarks/preferences.py rewards")
        return
    if sys.argv[1:2] == ["format"]:
        rows = measure_format(Path(sys.argv[2]).absolute())
        typed = "python benchmarks/preferences.py format SmolLM2-135M-Instruct.Q4_1.gguf"
        report("preferences_format", rows, command=typed)
        return
    report("preferences", [row for seed in SEEDS for row in measure_losses(seed)])


if __name__ == "__main__":
    main()
