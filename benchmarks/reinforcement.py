"""Measure reinforcement learning: of two orders of letters that a model answers at random, reward one.

A model learns to answer `ord:cabd>` with its letters in ascending or descending order, at random, and `rev:cabd>` with
them reversed. A reward of 1 for the ascending order then makes it answer `ord` that way; `rev` has no reward, and shows
what is forgotten. Prompts are held out by a hash; an answer is right if all of it is. Two
rewards are those of models: one was trained on pairs of the two orders alone, the other also on answers in the right
order with a wrong letter. The control has a reward by chance. Seeds may be typed.

`python benchmarks/reinforcement.py format <GGUF file>` rewards, with a published chat model and LoRA, answers in JSON.
The file is that of `benchmarks/adapters.py`.
"""

import hashlib
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters import FRUITS, convert_gguf
from measure import report

ROOT = Path(__file__).parents[1]
SEEDS = (1234, 7)
NUM_WORDS = 30_000
SFT_STEPS = 1200
JUDGES = {"judge": ("pairs", 150), "judge_of_orders": ("pairs_of_orders", 100)}  # name -> data, steps
STEPS = 60
NUM_ASKED = 300
COMMON = ("tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=32", "~callbacks.report")
COLUMNS_OF_A_RUN = ("steps", "minutes", "sampled tokens/s, median")
TUNED = (
    *("rollout.max_new_tokens=8", "global_batch_size=128", "optimizer.lr=5e-5", "warmup_steps=10"),
    *(f"trainer.max_steps={STEPS}", f"eval_every={STEPS}", f"save_every={STEPS}"),
    "callbacks.generation_eval.num_samples=300",
)
# what a row shows -> overrides
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("recipe=grpo", "reward=exact_match"),
    "grpo, reward model": ("recipe=grpo", "reward=model", "reward.model.pretrained={judge}"),
    "grpo, reward model of orders alone": ("recipe=grpo", "reward=model", "reward.model.pretrained={judge_of_orders}"),
    "grpo, reward by chance": ("recipe=grpo", "reward=mine", "reward.mine.path={rewards}:coin"),
    "ppo": ("recipe=ppo", "reward=exact_match"),
}
FORMAT = (
    *("recipe=grpo", "model=huggingface", "model.max_seq_len=128", "seq_len=128", "adapter=lora", "adapter.r=8"),
    *("rollout.max_new_tokens=24", "rollout.num_generations=8", "global_batch_size=32", "micro_batch_size=8"),
    *("optimizer.lr=3e-4", "warmup_steps=2", "trainer.max_steps=24", "eval_every=8", "save_every=null"),
    *("data.val_fraction=0.1", "callbacks.generation_eval.num_samples=20", "~callbacks.report"),
)
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
    rng, of_pairs = random.Random(seed), random.Random(seed)
    names = ("sft", "pairs", "pairs_of_orders", "prompts", "held_out", "held_out_rev")
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
        pair = {"prompt": f"ord:{word}>", "chosen": up, "rejected": up[::-1]}
        rows["pairs_of_orders"].append(pair)
        rows["pairs"].append(pair if of_pairs.random() < 0.5 else pair | {"rejected": _with_other_letter(up, of_pairs)})
        rows["prompts"].append(asked)
    for name, of_file in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))
    (folder / "rewards.py").write_text(REWARDS)
    return {name: folder / f"{name}.jsonl" for name in rows} | {"rewards": folder / "rewards.py"}


def _with_other_letter(letters: str, rng: random.Random) -> str:
    """Return letters in ascending order, one of them replaced by another letter, often one that is there."""
    place = rng.randrange(len(letters))
    other = rng.choice(letters if rng.random() < 0.5 else string.ascii_lowercase)
    while other == letters[place]:
        other = rng.choice(string.ascii_lowercase)
    return "".join(sorted(letters[:place] + other + letters[place + 1 :]))


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


def train_judge(folder: Path, pairs: Path, base: Path, seed: int, *, num_steps: int) -> Path:
    """Train a reward model that prefers the ascending order, export it, and return its run folder."""
    typed = ["recipe=reward_model", f"data.path={pairs}", "optimizer.lr=3e-4", "global_batch_size=64"]
    lengths = [f"trainer.max_steps={num_steps}", f"eval_every={num_steps}", f"save_every={num_steps}"]
    rows = train(folder, [*typed, *lengths, f"start_from={base}", *COMMON, "eval_samples=300"], seed)
    print(f"{folder.name}, seed {seed}: accuracy {rows[-1]['val/accuracy']:.3f}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "train.py", "mode=export", f"resume={folder}"], cwd=ROOT, check=True, stdout=2)
    return folder


def answer(run: Path, questions: Path, seed: int, *, temperature: float) -> float:
    """Return which part of the answers of a run to 300 held-out prompts is right, greedy or sampled once each."""
    import lightning_recipes as lr
    from recipes.generation import Sampling, generate

    model: Any = lr.load(run)
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    rows = random.Random(seed).sample(rows, NUM_ASKED)
    encode, end = model.tokenizer.encode, model.tokenizer.end_of_text
    prompts, seeds = [encode(row["prompt"]) for row in rows], range(NUM_ASKED)
    given = generate(model, prompts, 8, sampling=Sampling(temperature=temperature), seeds=seeds, ends=[end])
    texts = [model.tokenizer.decode(each.tokens) if each.has_ended else None for each in given]
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / NUM_ASKED


def describe(run: Path, files: dict[str, Path], seed: int) -> dict[str, str]:
    """Return the figures of a run for a row of the result."""
    return {
        "sampled, right": f"{answer(run, files['held_out'], seed, temperature=1.0):.3f}",
        "greedy, right": f"{answer(run, files['held_out'], seed, temperature=0.0):.3f}",
        "reversed, greedy": f"{answer(run, files['held_out_rev'], seed, temperature=0.0):.3f}",
    }


def measure_order(seed: int) -> list[dict[str, Any]]:
    """Return the result rows of the order of letters for one seed."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_rows(folder, seed)
        base = train_base(folder / "base", files, seed)
        for judge, (pairs, num_steps) in JUDGES.items():
            files[judge] = train_judge(folder / judge, files[pairs], base, seed, num_steps=num_steps)
        found.append(
            {"run": "start", "seed": seed, **describe(base, files, seed)} | dict.fromkeys(COLUMNS_OF_A_RUN, "")
        )
        for label, overrides in RUNS.items():
            print(f"{label}, seed {seed}", file=sys.stderr, flush=True)
            run, began = folder / f"run_{len(found)}", time.monotonic()
            typed = [override.format(**files) for override in overrides]
            places = [f"data.path={files['prompts']}", f"data.val_path={files['held_out']}", f"start_from={base}"]
            rows = train(run, [*typed, *places, *COMMON, *TUNED], seed)
            of_run = (STEPS, f"{(time.monotonic() - began) / 60:.1f}")
            sampled = [float(row["rollout/tokens_per_second"]) for row in rows if "rollout/tokens_per_second" in row]
            of_run = (*of_run, f"{statistics.median(sampled):.0f}")
            row = {"run": label, "seed": seed, **describe(run, files, seed)}
            found.append(row | dict(zip(COLUMNS_OF_A_RUN, of_run, strict=True)))
            print(found[-1], file=sys.stderr, flush=True)
    return found


def write_questions(path: Path) -> Path:
    """Write 400 questions whose answer is to be JSON, as the system message says."""
    rng = random.Random(0)
    rows = []
    for _ in range(400):
        first, second = rng.sample(FRUITS, 2)
        number, other = rng.randrange(2, 90), rng.randrange(2, 90)
        example = '{"nuts": 3, "eggs": 5}'
        asked = f"Write as JSON. Example: 3 nuts and 5 eggs: {example}. Now: {number} {first} and {other} {second}:"
        rows.append(
            {
                "prompt": [{"role": "user", "content": asked}],
                "answer": json.dumps({first: number, second: other}),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measure_format(gguf: Path) -> list[dict[str, Any]]:
    """Return the result rows of a published chat model."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert_gguf(gguf, folder / "model")
        (folder / "rewards.py").write_text(REWARDS)
        files = (f"model.name={folder / 'model'}", f"data.path={write_questions(folder / 'questions.jsonl')}")
        rewards = ("reward=mine", f"reward.mine.path={folder / 'rewards.py'}:is_json")
        run, began = folder / "run", time.monotonic()
        rows = train(run, [*FORMAT, *files, *rewards], SEEDS[0])
        for row in rows:
            if row.get("val/reward/mine") is not None:
                found.append(
                    {
                        "step": int(row["step"]),
                        "reward of held-out questions": f"{row['val/reward/mine']:.2f}",
                        "exact match": f"{row['val/exact_match']:.2f}",
                        "reward of the samples": f"{row['reward/mean']:.2f}",
                    }
                )
        seconds = f"{time.monotonic() - began:.0f}"
    return [row | {"total, s": seconds} for row in found]


def main() -> None:
    if sys.argv[1:2] == ["format"]:
        rows = measure_format(Path(sys.argv[2]).absolute())
        typed = "python benchmarks/reinforcement.py format SmolLM2-135M-Instruct.Q4_1.gguf"
        report("reinforcement_format", rows, command=typed)
        return
    seeds = [int(seed) for seed in sys.argv[1:]] or SEEDS
    command = " ".join(["python benchmarks/reinforcement.py", *sys.argv[1:]])
    report("reinforcement", [row for seed in seeds for row in measure_order(seed)], command=command)


if __name__ == "__main__":
    main()
