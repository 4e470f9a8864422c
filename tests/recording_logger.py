"""A logger of another package: it writes what it gets to a file of its own, and can go on in a run that exists."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger


class RecordingLogger(Logger):
    """Appends calls to `<folder>/<run id>.jsonl`.

    Args:
        folder: Folder of the service.
        run_id: Run to go on in; None: a new one.
        fails_at: Step whose row it cannot take; None: it takes all.
    """

    def __init__(self, folder: str, run_id: str | None = None, fails_at: int | None = None) -> None:
        super().__init__()
        Path(folder).mkdir(exist_ok=True)
        self.run_id = run_id or f"run_{len(list(Path(folder).iterdir()))}"
        self._path = Path(folder) / f"{self.run_id}.jsonl"
        self._fails_at = fails_at
        self._write(call="open")

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> str:
        return self.run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step == self._fails_at:
            raise ConnectionError("the service is away")
        self._write(call="row", step=step, **metrics)

    def log_hyperparams(self, params: Any) -> None:
        self._write(call="config", seed=params["seed"])

    def finalize(self, status: str) -> None:
        self._write(call="end", status=status)

    def _write(self, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(fields) + "\n")


class NewRunsOnly(RecordingLogger):
    """One that cannot go on in a run that exists."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)


class KillOnceSent(Callback):
    """Kills the process in the batch after an optimizer step, once every logger has sent its rows up to another one."""

    def __init__(self, *, step: int, sent: int) -> None:
        self.step = step
        self.sent = sent

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step:
            return
        path = Path(trainer.default_root_dir) / "logger_runs.json"
        while any(run["sent"] < self.sent for run in json.loads(path.read_text()).values()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def read_calls(path: Path, kind: str) -> list[dict[str, Any]]:
    calls = [json.loads(line) for line in path.open()]
    return [call for call in calls if call.pop("call") == kind]
