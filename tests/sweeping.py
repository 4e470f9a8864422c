"""Start sweeps of one-second runs from the command line and read their results."""

import csv
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from started import Started
from support import ROOT, TINY, read_metrics

# prefixes of metrics that differ between runs
MEASURED = ("time/", "throughput/", "memory/")
TRAIN = str(ROOT / "train.py")
# a callback that writes a report for each rank and injects faults by learning rate
WATCHER = """
import json, os, signal, time
from pathlib import Path
from lightning.pytorch import Callback
from recipes.runtime.signals import was_requested

class Watcher(Callback):
    def __init__(self, folder, raise_at_lr=None, kill_at_lr=None, wait_at_lr=None, seconds_a_step=0.0):
        self.folder = Path(folder)
        self.raise_at_lr, self.kill_at_lr, self.wait_at_lr = raise_at_lr, kill_at_lr, wait_at_lr
        self.seconds_a_step = seconds_a_step

    def _write_report(self, trainer, **more):
        self.folder.mkdir(exist_ok=True)
        report = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        report |= {"run_folder": str(trainer.default_root_dir), "cores": sorted(os.sched_getaffinity(0))}
        report |= {"lr": trainer.optimizers[0].param_groups[0]["initial_lr"], "began": time.time()}
        report |= {"pid": os.getpid(), "port": os.environ.get("MASTER_PORT"), "step": trainer.global_step}
        report |= {name: os.environ[name] for name in ("RANK", "SLURM_PROCID", "PL_GLOBAL_SEED") if name in os.environ}
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(report | more))

    def on_train_start(self, trainer, *_):
        self._write_report(trainer)

    def on_train_end(self, trainer, *_):
        report = json.loads((self.folder / f"{os.getpid()}.json").read_text())
        self._write_report(trainer, began=report["began"], ended=time.time())

    def on_train_batch_end(self, trainer, *_):
        lr = trainer.optimizers[0].param_groups[0]["initial_lr"]
        time.sleep(self.seconds_a_step)
        if trainer.global_step != 3:
            return
        saved = Path(trainer.default_root_dir) / "checkpoints" / "step_0000002.ckpt"
        while lr in (self.raise_at_lr, self.kill_at_lr, self.wait_at_lr) and not saved.exists():
            time.sleep(0.02)
        once = Path(trainer.default_root_dir) / "was_killed"
        if lr == self.raise_at_lr:
            raise OSError("the disk is gone")
        if lr == self.kill_at_lr and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if lr == self.wait_at_lr and not once.exists():
            (Path(trainer.default_root_dir) / "waits").touch()
            while not once.exists() and not was_requested():
                time.sleep(0.02)
"""


class Sweeps:
    """Starts sweeps in one folder.

    Args:
        folder: Working directory of the commands.
        texts: Folder with the training texts.
        environ: Additional environment variables.
    """

    def __init__(self, folder: Path, texts: str, *, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._environ = dict(environ or {})
        (folder / "watcher.py").write_text(WATCHER)
        self._texts = texts
        self.started: list[Started] = []

    def start(self, sweep: str, *overrides: str, records: str = "records", **faults: float) -> Started:
        """Start `python train.py -m …`; runs have four steps and a checkpoint every second step."""
        return self._start(["-m", f"hydra.sweep.dir={sweep}", *overrides], records, faults)

    def start_run(self, folder: str, *overrides: str, records: str = "records", **faults: float) -> Started:
        """Start a single run of this kind."""
        return self._start([f"hydra.run.dir={folder}", *overrides], records, faults)

    def _start(self, arguments: Sequence[str], records: str, faults: Mapping[str, float]) -> Started:
        watcher = ["+callbacks.watcher._target_=watcher.Watcher"]
        watcher += [f"+callbacks.watcher.folder={self.folder / records}"]
        watcher += [f"+callbacks.watcher.{name}={value}" for name, value in faults.items()]
        run = [*TINY, f"data.path={self._texts}", "trainer.max_steps=4", "trainer.accelerator=cpu"]
        run += ["warmup_steps=1", "save_every=2", "eval_every=2"]
        multirun = [argument for argument in arguments if argument == "-m"]  # must come first
        rest = [argument for argument in arguments if argument != "-m"]
        command = [sys.executable, TRAIN, *multirun, *run, *watcher, *rest]
        paths = [self.folder, ROOT / "tests"]
        started = Started(command, folder=self.folder, paths=paths, environ=self._environ)
        self.started.append(started)
        return started

    def run(self, sweep: str, *overrides: str, records: str = "records", **faults: float) -> tuple[int, str]:
        """Run a sweep to completion; return the exit code and the output."""
        started = self.start(sweep, *overrides, records=records, **faults)
        output = started.end(timeout=280.0)
        assert started.left() == [], output
        return started.process.returncode, output

    def records(self, records: str = "records") -> list[dict[str, Any]]:
        """Return the reports of all ranks in all jobs."""
        return [json.loads(path.read_text()) for path in sorted((self.folder / records).glob("*.json"))]

    def board(self, sweep: str) -> list[dict[str, str]]:
        """Return the rows of `sweep.csv`."""
        with (self.folder / sweep / "sweep.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def states(self, sweep: str) -> dict[str, str]:
        """Return the state of each job, keyed by learning rate."""
        return {row["optimizer.lr"]: row["state"] for row in self.board(sweep)}


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the bit-for-bit deterministic metrics of a run."""
    return [
        {name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in read_metrics(folder)
    ]


def by_job(reports: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the reports of ranks by run folder."""
    folders = {report["run_folder"] for report in reports}
    return {folder: [report for report in reports if report["run_folder"] == folder] for folder in folders}


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"the condition is still false after {seconds} s")
