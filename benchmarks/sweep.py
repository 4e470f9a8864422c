"""Measure run start-up: from the command to the first step, alone and per sweep job, compared with Hydra's launcher.

    python benchmarks/sweep.py [--jobs 8] [--rounds 3]

Hydra's basic launcher runs jobs sequentially; there, too, train.py starts a new process tree for each job, because
jobs in one process would share process groups, random state and loggers. A job is timed from the end of the previous
job to its own first step; the launchers alternate.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
OVERRIDES = (
    "tokenizer=bytes", "data=text_files", "model.vocab_size=257", "model.num_layers=2", "model.num_heads=2",
    "model.hidden_size=32", "model.max_seq_len=32", "global_batch_size=8", "eval_samples=8", "trainer.max_steps=2",
    "eval_every=2", "save_every=null", "warmup_steps=1", "trainer.accelerator=cpu",
    "~callbacks.report", "~callbacks.sample_text",
)  # fmt: skip
FIRST_STEP = """
import json, time
from lightning.pytorch import Callback

class FirstStep(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 1 and trainer.is_global_zero:
            with open(trainer.default_root_dir + "/first_step.json", "w") as file:
                json.dump(time.time(), file)

    def on_train_end(self, trainer, *_):
        if trainer.is_global_zero:
            with open(trainer.default_root_dir + "/end.json", "w") as file:
                json.dump(time.time(), file)
"""


def run_command(folder: Path, sweep: str, *overrides: str) -> tuple[float, float]:
    """Run a command; return its start time, in seconds since the epoch, and its duration."""
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *overrides,
        *OVERRIDES,
        f"data.path={folder / 'texts'}",
    ]
    command += ["+callbacks.first_step._target_=first_step.FirstStep"]
    began = time.time()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=_environ(folder), check=False)
    if done.returncode:
        raise SystemExit(f"{sweep}: {done.stdout}{done.stderr}")
    return began, time.time() - began


def _environ(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder)}


def seconds_of_jobs(folder: Path, began: float) -> list[float]:
    """Return each job's seconds from the end of the previous job, or from the command, to its first step."""
    jobs = sorted(folder.glob("*/first_step.json"), key=lambda file: json.loads(file.read_text()))
    found, free_at = [], began
    for job in jobs:
        found.append(json.loads(job.read_text()) - free_at)
        free_at = json.loads((job.parent / "end.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seeds = "seed=" + ",".join(map(str, range(args.jobs)))
    launchers = {"ours": (), "Hydra's basic": ("hydra/launcher=basic",)}
    alone: list[float] = []
    firsts: dict[str, list[float]] = {name: [] for name in launchers}
    others: dict[str, list[float]] = {name: [] for name in launchers}
    walls: dict[str, list[float]] = {name: [] for name in launchers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first_step.py").write_text(FIRST_STEP)
        (folder / "texts").mkdir()
        for number in range(24):
            (folder / "texts" / f"{number}.txt").write_text(f"line {number} of many\n" * 100)
        for turn in range(args.rounds):
            began, _ = run_command(folder, "alone", f"hydra.run.dir=alone_{turn}/0")
            alone += seconds_of_jobs(folder / f"alone_{turn}", began)
            for launcher, overrides in launchers.items():
                sweep = f"{launcher.split()[-1]}_{turn}"
                began, wall = run_command(folder, sweep, "-m", seeds, f"hydra.sweep.dir={sweep}", *overrides)
                first, *rest = seconds_of_jobs(folder / sweep, began)
                firsts[launcher].append(first)
                others[launcher] += rest
                walls[launcher].append(wall)
    print(f"one run: {statistics.median(alone):.2f} s from the command to the first step")
    print(f"a sweep of {args.jobs}, one at a time, seconds (medians of {args.rounds}):")
    print(f"{'launcher':16}{'first job':>12}{'each other':>12}{'in all':>10}")
    for launcher in launchers:
        numbers = (firsts[launcher], others[launcher], walls[launcher])
        first, other, wall = map(statistics.median, numbers)
        print(f"{launcher:16}{first:12.2f}{other:12.2f}{wall:10.1f}")


if __name__ == "__main__":
    main()
