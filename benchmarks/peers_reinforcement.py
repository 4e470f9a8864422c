"""`recipe=grpo` compared with TRL's `GRPOTrainer`: the seconds of a step, and the rewards of two seeds.

The order of letters of `benchmarks/reinforcement.py`, from the same weights. Both trainings run at the same time, each
in a process of its own, and take turns of a few steps, so that drift of the machine affects both equally.

`python benchmarks/peers_reinforcement.py <folder>` keeps rows and base model in a folder, or takes them from it.

`python benchmarks/peers_reinforcement.py lengths <folder>` compares a step with longer completions: a model that
answers with letters at random, from 8 of them up, is rewarded for those of the first half of the alphabet.

`python benchmarks/peers_reinforcement.py gpu` takes GPT-2 124M on a GPU, and 64 completions of 256 tokens a step.
"""

import json
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import report
from peers import PEERS, ROOT
from reinforcement import COMMON, REWARDS, SEEDS, train, train_base, write_rows
from turns import READY

CONTENDERS = {"recipe_grpo": sys.executable, "trl_grpo": PEERS}
STEPS, TURN, SKIP = 60, 5, 5
PART = 10  # steps whose rewards are averaged
COMPLETIONS, LR, WARMUP_STEPS = 128, 5e-5, 10
NUM_GENERATIONS, MAX_NEW_TOKENS = 8, 8
THREADS = 1
# what a row shows -> bytes of the prompts; None: all of them. TRL pads prompts on the left and gives the model no
# positions in training: those of a GPT-2 are then other ones than in its samples, unless all prompts are of one length.
CASES: dict[str, int | None] = {"8 to 10 tokens": None, "10 tokens": 10}
LENGTHS = (8, 32)  # longest completions
STEPS_OF_LENGTHS = 20
LONG = (*(override for override in COMMON if "max_seq_len" not in override), "model.max_seq_len=128")

ON_GPU = {"skip": 4, "completions": 64, "max_new_tokens": 256, "lr": 1e-6, "warmup_steps": 2, "threads": 8}
STEPS_ON_GPU = 10


def list_overrides(base: Path, prompts: Path, seed: int, *, steps: int, typed: Sequence[str]) -> list[str]:
    """Return what is typed after `train.py`."""
    return [
        *("recipe=grpo", *typed, f"start_from={base}", f"seed={seed}"),
        *(f"data.path={prompts}", f"data.cache_dir={base.parent / 'cache'}", "data.val_fraction=0.05"),
        *(f"rollout.num_generations={NUM_GENERATIONS}", f"global_batch_size={COMPLETIONS}"),
        *(f"optimizer.lr={LR}", f"warmup_steps={WARMUP_STEPS}", f"trainer.max_steps={steps}"),
        *(f"eval_every={10 * steps}", "eval_samples=8", "save_every=null"),
    ]


def export(base: Path, folder: Path) -> Path:
    """Write the model of a run for transformers."""
    typed = [sys.executable, "train.py", "mode=export", f"resume={base}", f"mode.path={folder}"]
    subprocess.run(typed, cwd=ROOT, check=True, stdout=sys.stderr)
    return folder


class Contender:
    """A training in a process of its own, which waits before each turn.

    Attributes:
        found: What it has reported at its end.
    """

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self.found: dict[str, Any] | None = None
        self._name = name
        script = Path(__file__).parent / "contenders" / f"{name}.py"
        self._process = subprocess.Popen(
            [CONTENDERS[name], str(script), json.dumps(spec)],
            env=os.environ | {"OMP_NUM_THREADS": str(THREADS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait()

    def take_turn(self) -> None:
        """Let it train until it waits again, or has ended."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._wait()

    def _wait(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        line = ""
        for line in self._process.stdout:
            if line.strip() == READY:
                return
            print(f"{self._name}: {line}", end="", file=sys.stderr, flush=True)
        if self._process.wait() != 0:
            raise RuntimeError(f"{self._name} has failed, with what it has written above")
        self.found = json.loads(line)


def compare(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one seed, one per contender."""
    steps = spec["steps"]
    running = {name: Contender(name, spec) for name in CONTENDERS}
    while any(contender.found is None for contender in running.values()):
        for contender in running.values():
            if contender.found is None:
                contender.take_turn()
    found = {name: contender.found for name, contender in running.items() if contender.found is not None}
    rows = []
    for name, of_one in found.items():
        row: dict[str, Any] = {"contender": name.replace("_", " "), "seed": spec["seed"]}
        skip = spec.get("skip", SKIP)
        for key, unit in (("seconds", "s"), ("cpu_seconds", "CPU s")):
            median, ours = (statistics.median(each[key][skip:]) for each in (of_one, found["recipe_grpo"]))
            row |= {f"step, {unit}": f"{median:.2f}", f"{unit} / recipe": f"{median / ours:.2f}"}
        row["peak, MiB"] = f"{of_one['peak_rss_bytes'] / 2**20:.0f}"
        if of_one["peak_gpu_bytes"]:
            row["peak of the GPU, MiB"] = f"{of_one['peak_gpu_bytes'] / 2**20:.0f}"
        for first in range(0, steps, PART):
            part = of_one["rewards"][first : first + PART]
            row[f"reward, {first + 1} to {first + PART}"] = f"{statistics.mean(part):.2f}"
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def keep_length(prompts: Path, length: int) -> Path:
    """Write the rows whose prompts have a length, in bytes."""
    lines = prompts.read_text().splitlines(keepends=True)
    kept = prompts.with_stem(f"{prompts.stem}_of_{length}")
    kept.write_text("".join(line for line in lines if len(json.loads(line)["prompt"]) == length))
    return kept


def make_spec(
    base: Path,
    model: Path,
    prompts: Path,
    seed: int,
    *,
    steps: int = STEPS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    reward: Path | None = None,
) -> dict[str, Any]:
    """Return what both contenders train.

    Args:
        base: Run folder of the model.
        model: The same model, exported.
        prompts: Rows.
        seed: Seed.
        steps: Number of steps.
        max_new_tokens: Longest completion.
        reward: File with a function `early_letters`; None: 1 for the answer of a row.
    """
    rewarded = ("reward=exact_match", *COMMON)
    if reward is not None:
        rewarded = ("reward=mine", f"reward.mine.path={reward}:early_letters", *LONG)
    typed = [*rewarded, f"rollout.max_new_tokens={max_new_tokens}"]
    return {
        "overrides": list_overrides(base, prompts, seed, steps=steps, typed=typed),
        "model": str(model),
        "prompts": str(prompts),
        "reward": None if reward is None else str(reward),
        "seed": seed,
        "steps": steps,
        "completions": COMPLETIONS,
        "num_generations": NUM_GENERATIONS,
        "max_new_tokens": max_new_tokens,
        "lr": LR,
        "warmup_steps": WARMUP_STEPS,
        "threads": THREADS,
        "turn": TURN,
        "accelerator": "cpu",
    }


def measure(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all seeds."""
    files, base = write_rows(folder, SEEDS[0]), folder / "base"
    if not base.is_dir():
        train_base(base, files, SEEDS[0])
    model = export(base, folder / "model")
    found = []
    for case, length in CASES.items():
        prompts = files["prompts"] if length is None else keep_length(files["prompts"], length)
        for seed in SEEDS:
            rows = compare(make_spec(base, model, prompts, seed))
            found += [{"prompts": case, **row} for row in rows]
    return found


def write_letters(folder: Path) -> Path:
    """Write prompts of 4 letters, with completions of 8 letters and up that stop at random, and the reward."""
    rng = random.Random(0)
    rows = []
    for _ in range(4000):
        length = 8 + min(int(rng.expovariate(1 / 60)), 100)
        prompt, answer = ("".join(rng.choices(string.ascii_lowercase, k=number)) for number in (4, length))
        rows.append({"prompt": f"{prompt}>", "completion": answer})
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "asked.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    return folder / "letters.jsonl"


def measure_lengths(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all lengths of completions."""
    letters, base = write_letters(folder), folder / "letters"
    if not base.is_dir():
        typed = ["recipe=sft", f"data.path={letters}", "optimizer.lr=1e-3", "global_batch_size=32", "seq_len=128"]
        train(base, [*typed, "trainer.max_steps=40", "eval_every=40", "save_every=40", *LONG], SEEDS[0])
    model = export(base, folder / "letters_model")
    found = []
    for length in LENGTHS:
        shared = {"steps": STEPS_OF_LENGTHS, "max_new_tokens": length, "reward": folder / "rewards.py"}
        rows = compare(make_spec(base, model, folder / "asked.jsonl", SEEDS[0], **shared))
        found += [{"longest completion": length, **row} for row in rows]
    return found


def measure_on_gpu(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of GPT-2 124M, which has read some of Python's standard library; few of its samples end."""
    base, prompts, rewards = folder / "base", folder / "prompts.jsonl", folder / "rewards.py"
    typed = ["recipe=single_bf16", "model=gpt2", "model.vocab_size=32768", "tokenizer=bpe", "data=stdlib_text"]
    typed += ["trainer.max_steps=20", "global_batch_size=32", "eval_every=20", "eval_samples=8", "save_every=20"]
    typed += ["compile=false", "~callbacks.report", f"data.cache_dir={folder / 'cache'}", f"hydra.run.dir={base}"]
    subprocess.run([sys.executable, "train.py", *typed], cwd=ROOT, check=True, stdout=sys.stderr)
    lines = Path(json.__file__).read_text().splitlines()
    asked = ["\n".join(lines[first : first + 6])[:160] for first in range(len(lines) - 6)]
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": "e"}) + "\n" for text in asked))
    rewards.write_text(REWARDS)
    spec = make_spec(base, export(base, folder / "model"), prompts, SEEDS[0], steps=STEPS_ON_GPU, reward=rewards)
    spec |= ON_GPU | {"accelerator": "gpu"}
    spec["overrides"] = [
        *("recipe=grpo", "reward=mine", f"reward.mine.path={rewards}:early_letters", f"start_from={base}"),
        "~callbacks.report",
        *("model=gpt2", "model.vocab_size=32768", "tokenizer=bpe", f"seed={SEEDS[0]}", "precision=bf16-mixed"),
        *(f"data.path={prompts}", f"data.cache_dir={folder / 'cache'}", "data.val_fraction=0.05"),
        *(f"rollout.num_generations={NUM_GENERATIONS}", f"rollout.max_new_tokens={spec['max_new_tokens']}"),
        *(f"global_batch_size={spec['completions']}", f"micro_batch_size={spec['completions']}"),
        *(f"optimizer.lr={spec['lr']}", f"warmup_steps={spec['warmup_steps']}", "save_every=null"),
        *(f"trainer.max_steps={spec['steps']}", f"eval_every={10 * spec['steps']}", "eval_samples=8"),
    ]
    return compare(spec)


def main() -> None:
    typed = sys.argv[1:]
    if typed == ["gpu"]:
        with tempfile.TemporaryDirectory() as name:
            rows = measure_on_gpu(Path(name))
        report("peers_reinforcement_gpu", rows, command="python benchmarks/peers_reinforcement.py gpu")
        return
    of_lengths = typed[:1] == ["lengths"]
    given = typed[1:] if of_lengths else typed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(given[0] if given else name).absolute()
        if of_lengths:
            rows = measure_lengths(folder)
            report("peers_reinforcement_lengths", rows, command="python benchmarks/peers_reinforcement.py lengths")
        else:
            report("peers_reinforcement", measure(folder))


if __name__ == "__main__":
    main()
