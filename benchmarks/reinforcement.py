"""Measure reinforcement learning: of two orders of letters that a model answers at random, reward one.

A model learns to answer `ord:cabd>` with its letters in ascending or descending order, at random, and `rev:cabd>` with
them reversed. A reward of 1 for the ascending order then makes it answer `ord` that way; `rev` has no reward, and shows
what is forgotten. Prompts are held out by a hash; an answer is right if all of it is. The control has a reward by
chance.

`python benchmarks/reinforcement.py format <GGUF file>` rewards, with a published chat model and LoRA, answers in JSON.
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
SFT_STEPS = 1200
STEPS = 60
COMMON = ("tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=32", "~callbacks.report")
ROLLOUT = ("rollout.max_new_tokens=8", "rollout.num_generations=8")
TUNED = (
    *("optimizer.lr=5e-5", "global_batch_size=128", f"trainer.max_steps={STEPS}", "warmup_steps=10"),
    *(f"eval_every={STEPS}", "save_every=null", "callbacks.generation_eval.num_samples=300"),
)
# what a row shows -> overrides
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("recipe=grpo",),
    "grpo, reward by chance": ("recipe=grpo", "reward=mine", "reward.mine.path={rewards}:coin"),
}
REWARDS = '''
import json
import random
import re


def coin(prompts, completions, references, rows):
    return [float(random.random() < 0.5) for _ in completions]


def is_json(prompts, completions, references, rows):
    """1 for the expected object, 0.5 for another one, and 0.2 for something in braces."""
    scores = []
    for completion, reference in zip(completions, references, strict=True):
        found = re.search(r"\\{.*\\}", completion, re.DOTALL)
        try:
            given = json.loads(completion)
        except ValueError:
            scores.append(0.2 if found else 0.0)
        else:
            scores.append(1.0 if given == json.loads(reference) else 0.5 if isinstance(given, dict) else 0.0)
    return scores
'''


def write_rows(folder: Path, seed: int) -> dict[str, Path]:
    """Write the rows of all stages, each prompt in one split of all of them."""
    rng = random.Random(seed)
    names = ("sft", "prompts", "held_out", "held_out_rev")
    rows: dict[str, list[dict[str, str]]] = {name: [] for name in names}
    words = {"".join(rng.sample(string.ascii_lowercase, rng.choice((3, 4, 5)))) for _ in range(NUM_WORDS)}
    for word in sorted(words):
        up, back = "".join(sorted(word)), word[::-1]
        asked, other = {"prompt": f"ord:{word}>", "answer": up}, {"prompt": f"rev:{word}>", "answer": back}
        if hashlib.sha256(word.encode()).digest()[0] < 26:  # one in ten
            rows["held_out"].append(asked)
            rows["held_out_rev"].append(other)
            continue
        rows["sft"].append({"prompt": f"ord:{word}>", "completion": up if rng.random() < 0.5 else up[::-1]})
        rows["sft"].append({"prompt": f"rev:{word}>", "completion": back})
        rows["prompts"].append(asked)
    for name, of_file in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))
    (folder / "rewards.py").write_text(REWARDS)
    return {name: folder / f"{name}.jsonl" for name in rows} | {"rewards": folder / "rewards.py"}


def train(folder: Path, overrides: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Train in this process and return the rows of metrics."""
    import lightning_recipes as lr

    run = lr.compose(*overrides, f"data.cache_dir={folder.parent / 'cache'}", f"seed={seed}", f"hydra.run.dir={folder}")
    run.fit()
    return [*lr.read(folder).rows]


def train_base(folder: Path, files: dict[str, Path], seed: int) -> Path:
    """Train the model that answers `ord` in either order, and return its run folder."""
    typed = ["recipe=sft", f"data.path={files['sft']}", "optimizer.lr=1e-3", "global_batch_size=64"]
    lengths = [f"trainer.max_steps={SFT_STEPS}", f"eval_every={SFT_STEPS}", f"save_every={SFT_STEPS}"]
    train(folder, [*typed, "data.packing=false", *lengths, *COMMON, "eval_samples=300"], seed)
    return folder


def answer(folder: Path, start: Path, path: Path, seed: int, *, temperature: float) -> float:
    """Return which part of the answers of a run to held-out prompts is right: greedy, or sampled once each."""
    import lightning_recipes as lr

    model = lr.load(start)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = random.Random(seed).sample(rows, 300)
    given = model.complete([row["prompt"] for row in rows], max_new_tokens=8, temperature=temperature, seed=seed)
    return sum(text == row["answer"] for text, row in zip(given, rows, strict=True)) / len(rows)
