"""Measure reinforcement learning: of two orders of letters that a model answers at random, reward one.

A model learns to answer `ord:cabd>` with its letters in ascending or descending order, at random, and `rev:cabd>` with
them reversed. A reward of 1 for the ascending order then makes it answer `ord` that way; `rev` has no reward, and shows
what is forgotten. Prompts are held out by a hash; an answer is right if all of it is. Two rewards are those of models:
one was trained on pairs of the two orders alone, the other also on answers in the right order with a wrong letter. The
control has a reward by chance. Seeds may be typed; the rows of others stay in the result.

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
from measure import RESULTS, report

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
    *("recipe=grpo", "model=huggingface", "model.max_seq_len=64", "seq_len=64", "adapter=lora", "adapter.r=8"),
    *("rollout.max_new_tokens=20", "rollout.num_generations=8", "rollout.temperature=0.8"),
    *("global_batch_size=32", "micro_batch_size=8", "optimizer.lr=5e-4", "warmup_steps=2", "trainer.max_steps=16"),
    *("data.val_fraction=0.1", "eval_every=4", "save_every=null", "~callbacks.report"),
    *("callbacks.generation_eval.num_samples=40", "callbacks.generation_eval.at_start=true"),
)
REWARDS = '''
import json
import random
import statistics


def coin(prompts, completions, references, rows):
    return [float(random.random() < 0.5) for _ in completions]


def early_letters(prompts, completions, references, rows):
    """Which part of the letters is in the first half of the alphabet."""
    return [statistics.mean([letter < "n" for letter in text] or [0]) for text in completions]


def is_json(prompts, completions, references, rows):
    """1 for nothing but a JSON object that gives each of the two asked fruits an integer, whichever, else 0."""
    return [float(all(check(*each))) for each in zip(completions, references, strict=True)]


def conditions(prompts, completions, references, rows):
    """Which part of the conditions holds."""
    return [statistics.mean(check(*each)) for each in zip(completions, references, strict=True)]


def check(completion, reference):
    try:
        given = json.loads(completion)
    except ValueError:
        given = None
    is_object = isinstance(given, dict)
    given = given if is_object else {}
    are_integers = len(given) == 2 and all(type(value) is int for value in given.values())
    return [completion.startswith("{"), is_object, are_integers, *(fruit in given for fruit in json.loads(reference))]
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
    """Write 400 questions whose answer is to be JSON, as the system message says by a shorter example."""
    rng = random.Random(0)
    rows = []
    for _ in range(400):
        (first, second), (number, other) = rng.sample(FRUITS, 2), (rng.randrange(2, 90), rng.randrange(2, 90))
        asked = {"role": "user", "content": f"{number} {first} and {other} {second}"}
        system = {"role": "system", "content": 'Answer in JSON, such as {"nuts": 3}.'}
        rows.append({"prompt": [system, asked], "answer": json.dumps({first: number, second: other})})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measure_format(gguf: Path) -> list[dict[str, Any]]:
    """Return the result rows of a published chat model, one per check of the held-out prompts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert_gguf(gguf, folder / "model")
        rewards = folder / "rewards.py"
        rewards.write_text(REWARDS)
        own = f"{{_target_: recipes.reward.mine.OwnFunction, weight: 1.0, path: '{rewards}:conditions'}}"
        typed = [f"model.name={folder / 'model'}", f"data.path={write_questions(folder / 'questions.jsonl')}"]
        typed += ["reward=mine", f"reward.mine.path={rewards}:is_json", f"+reward.conditions={own}"]
        began = time.monotonic(), time.process_time()
        sampled = {int(row["step"]): row for row in train(folder / "run", [*FORMAT, *typed], SEEDS[0])}
        ended = time.monotonic(), time.process_time()
        minutes, cpu_minutes = (f"{(end - begin) / 60:.1f}" for begin, end in zip(began, ended, strict=True))
        answers = [json.loads(line) for line in (folder / "run" / "answers.jsonl").read_text().splitlines()]
    found = []
    for step in sorted({answer["step"] for answer in answers}):
        of_step = [answer for answer in answers if answer["step"] == step]
        means = {
            key: statistics.mean(row[key] for row in of_step) for key in ("reward/mine", "reward/conditions", "score")
        }
        found.append(
            {
                "step": step,
                "held-out prompts": len(of_step),
                "greedy, right": f"{means['reward/mine']:.2f}",
                "greedy, conditions": f"{means['reward/conditions']:.2f}",
                "greedy, with the right numbers": f"{means['score']:.2f}",
                "sampled in training, right": f"{sampled[max(step, 1)]['reward/mine']:.2f}",
                "minutes in all": minutes,
                "CPU minutes in all": cpu_minutes,
            }
        )
    return found


def main() -> None:
    if sys.argv[1:2] == ["format"]:
        rows = measure_format(Path(sys.argv[2]).absolute())
        typed = "python benchmarks/reinforcement.py format SmolLM2-135M-Instruct.Q4_1.gguf"
        report("reinforcement_format", rows, command=typed)
        return
    seeds = [int(seed) for seed in sys.argv[1:]] or SEEDS
    for seed in seeds:  # the rows of other seeds stay
        file = RESULTS / "reinforcement.json"
        found = measure_order(seed)
        kept = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
        rows = [*(row for row in kept if row["seed"] != seed), *found]
        report("reinforcement", rows, command="python benchmarks/reinforcement.py <seed>")


if __name__ == "__main__":
    main()
