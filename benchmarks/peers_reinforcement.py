"""`recipe=grpo` compared with TRL's `GRPOTrainer`: the seconds of a step, and the rewards of two seeds.

The order of letters of `benchmarks/reinforcement.py`, from the same weights. Both trainings run at the same time, each
in a process of its own, and take turns of a few steps, so that drift of the machine affects both equally.

`python benchmarks/peers_reinforcement.py <folder>` keeps rows and base model in a folder, or takes them from it.
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
        for key, unit in (("seconds", "s"), ("cpu_seconds", "CPU s")):
            median, ours = (statistics.median(each[key][SKIP:]) for each in (of_one, found["recipe_grpo"]))
            row |= {f"step, {unit}": f"{median:.2f}", f"{unit} / recipe": f"{median / ours:.2f}"}
        row["peak, MiB"] = f"{of_one['peak_rss_bytes'] / 2**20:.0f}"
        for first in range(0, STEPS, PART):
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


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        report("peers_reinforcement", measure(Path(sys.argv[1] if sys.argv[1:] else name).absolute()))


if __name__ == "__main__":
    main()
