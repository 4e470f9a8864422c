"""`recipe=grpo` compared with TRL's `GRPOTrainer`: the seconds of a step, and the rewards of two seeds.

The order of letters of `benchmarks/reinforcement.py`, from the same weights. Both trainings run at the same time, each
in a process of its own, and take turns of a few steps, so that drift of the machine affects both equally.

`python benchmarks/peers_reinforcement.py <folder>` keeps rows and base model in a folder, or takes them from it.
`python benchmarks/peers_reinforcement.py gpu` takes GPT-2 124M on a GPU, and 64 completions of 256 tokens a step.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import report
from peers import PEERS, ROOT
from reinforcement import COMMON, SEEDS, train_base, write_rows
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


ON_GPU = {"steps": 10, "skip": 4, "completions": 64, "max_new_tokens": 256, "lr": 1e-6, "warmup_steps": 2, "threads": 8}
LETTER = """
def share(prompts, completions, references, rows):
    return [text.count("e") / max(1, len(text)) for text in completions]
"""


def list_overrides(base: Path, prompts: Path, seed: int) -> list[str]:
    """Return what is typed after `train.py`."""
    return [
        *("recipe=grpo", "reward=exact_match", *COMMON, f"start_from={base}", f"seed={seed}"),
        *(f"data.path={prompts}", f"data.cache_dir={base.parent / 'cache'}", "data.val_fraction=0.05"),
        *(f"rollout.num_generations={NUM_GENERATIONS}", f"rollout.max_new_tokens={MAX_NEW_TOKENS}"),
        *(f"global_batch_size={COMPLETIONS}", f"optimizer.lr={LR}", f"warmup_steps={WARMUP_STEPS}"),
        *(f"trainer.max_steps={STEPS}", f"eval_every={10 * STEPS}", "eval_samples=8", "save_every=null"),
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
        for first in range(0, spec["steps"], PART):
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


def make_spec(base: Path, model: Path, prompts: Path, seed: int) -> dict[str, Any]:
    """Return what both contenders train."""
    return {
        "overrides": list_overrides(base, prompts, seed),
        "model": str(model),
        "prompts": str(prompts),
        "seed": seed,
        "steps": STEPS,
        "completions": COMPLETIONS,
        "num_generations": NUM_GENERATIONS,
        "max_new_tokens": MAX_NEW_TOKENS,
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
    rewards.write_text(LETTER)
    spec = make_spec(base, export(base, folder / "model"), prompts, SEEDS[0]) | ON_GPU | {"accelerator": "gpu"}
    spec["overrides"] = [
        *("recipe=grpo", "reward=mine", f"reward.mine.path={rewards}:share", f"start_from={base}", "~callbacks.report"),
        *("model=gpt2", "model.vocab_size=32768", "tokenizer=bpe", f"seed={SEEDS[0]}", "precision=bf16-mixed"),
        *(f"data.path={prompts}", f"data.cache_dir={folder / 'cache'}", "data.val_fraction=0.05"),
        *(f"rollout.num_generations={NUM_GENERATIONS}", f"rollout.max_new_tokens={spec['max_new_tokens']}"),
        *(f"global_batch_size={spec['completions']}", f"micro_batch_size={spec['completions']}"),
        *(f"optimizer.lr={spec['lr']}", f"warmup_steps={spec['warmup_steps']}", "save_every=null"),
        *(f"trainer.max_steps={spec['steps']}", f"eval_every={10 * spec['steps']}", "eval_samples=8"),
    ]
    return compare(spec)


def main() -> None:
    if sys.argv[1:] == ["gpu"]:
        with tempfile.TemporaryDirectory() as name:
            rows = measure_on_gpu(Path(name))
        report("peers_reinforcement_gpu", rows, command="python benchmarks/peers_reinforcement.py gpu")
        return
    with tempfile.TemporaryDirectory() as name:
        report("peers_reinforcement", measure(Path(sys.argv[1] if sys.argv[1:] else name).absolute()))


if __name__ == "__main__":
    main()
