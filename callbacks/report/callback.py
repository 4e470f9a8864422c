"""Write report.html and curves.png to the run folder when a fit ends or raises; takes a second or two."""

import logging
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from ..lightning_internals import Row, RowTap, get_callbacks, get_learning_rates
from ..lightning_packages import Callback
from ..logged_step import completed_steps, output_folder
from ..protocols import SupportsRow
from .page import write_report
from .run_record import RecordedFit

log = logging.getLogger("lightning_recipes")
_DIVERGED = 3  # exit code of `TrainingDivergedError`


class RunReport(Callback):
    """Writes the run's report on rank 0 when a fit ends or raises.

    Records the rows of this fit itself, and what the other callbacks have done, with any logger or none: spikes, skips,
    rollbacks, stops. Writes to the `log_dir` of the first logger that has one, else to `trainer.default_root_dir`. If
    the module is a `SupportsRow`, it reads the files there instead, which include what was before a resume. Call
    `write_report(folder)` again once `summary.json` exists. If the report cannot be written, the traceback is logged
    and the fit is not affected. The picture needs matplotlib; without it, the page alone is written.

    Args:
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`; None draws all metrics, grouped by prefix.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(max_steps=1000, callbacks=[RunReport()])
    """

    only_shows: ClassVar[bool] = True  # neither what is trained nor what is measured depends on it

    def __init__(self, *, dashboard: Sequence[Mapping[str, Any]] | None = None) -> None:
        super().__init__()
        self._dashboard = dashboard
        self._rows: dict[int, dict[str, float]] | None = None  # by step; None if read from metrics.csv
        self._tap: RowTap | None = None
        self._began = 0.0
        self._has_begun = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_begun = True

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = None
        if trainer.is_global_zero and not isinstance(pl_module, SupportsRow):
            self._rows = {}
            self._rolled_back: list[dict[int, dict[str, float]]] = []
            self._events: list[dict[str, Any]] = []
            self._began = time.perf_counter()
            self.receive_event("start", trainer.global_step)
            self._tap = RowTap(trainer, lambda row: self._keep(trainer, row))

    def _keep(self, trainer: Trainer, row: Row) -> None:
        assert self._rows is not None, "the tap is set with the rows"
        kept = self._rows.setdefault(completed_steps(trainer), {})
        kept |= row.metrics
        kept |= get_learning_rates(trainer)

    def receive_event(self, event: str, step: int, **fields: Any) -> None:
        """Keep an event of a callback; see `callbacks.events.log_event`."""
        if self._rows is not None:
            self._events.append({"time": time.time(), "step": step, "event": event, **fields})

    def on_rollback(self, trainer: Trainer, pl_module: LightningModule, from_step: int, to_step: int) -> None:
        """Set the rows of the discarded steps apart: the same step numbers come again."""
        if self._rows is not None:
            self._rolled_back.append({step: row for step, row in self._rows.items() if step > to_step})
            self._rows = {step: row for step, row in self._rows.items() if step <= to_step}

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._write(trainer, status="finished")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # a resume that is refused leaves the page of the earlier start
        if trainer.state.fn == "fit" and (self._has_begun or self._rows is not None):
            status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
            has_diverged = getattr(exception, "exit_code", None) == _DIVERGED
            self._write(trainer, status="diverged" if has_diverged else status)

    def _write(self, trainer: Trainer, *, status: str) -> None:
        if self._tap is not None:
            self._tap.detach()
            self._tap = None
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()  # flush buffered rows
        self._note_early_stopping(trainer)
        folder = output_folder(trainer)
        if self._rows is None and (folder / "metrics.csv").exists():
            self.write_report(folder)
        elif self._rows and any(self._rows.values()):
            self._write_page(folder, lambda: self._get_fit(trainer, folder, status))
        elif trainer.global_step:
            log.warning("no report: nothing was logged; call self.log in training_step")

    def _note_early_stopping(self, trainer: Trainer) -> None:
        """Add the stop by a callback that logs no events, such as Lightning's EarlyStopping."""
        if self._rows is None or any(event["event"] == "stop" for event in self._events):
            return
        for callback in get_callbacks(trainer):
            if getattr(callback, "stopped_epoch", 0):
                self.receive_event("stop", completed_steps(trainer), why=f"{type(callback).__name__} ended the run")

    def _get_fit(self, trainer: Trainer, folder: Path, status: str) -> RecordedFit:
        assert self._rows is not None, "set at the start of the fit"
        device, module = trainer.strategy.root_device, trainer.lightning_module
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        if status == "finished" and any(event["event"] == "stop" for event in self._events):
            status = "stopped"
        summary: dict[str, Any] = {"status": status, "steps": completed_steps(trainer)}
        summary["seconds"] = round(time.perf_counter() - self._began, 3)
        callbacks: list[Any] = [*get_callbacks(trainer)]
        for callback in callbacks:
            summed = getattr(callback, "summed_fields", ())
            for key, value in callback.summary().items() if hasattr(callback, "summary_fields") else ():
                if key in summed and key in summary:
                    summary[key] += value
                elif value is not None:
                    summary.setdefault(key, value)
        return RecordedFit(
            title=_get_title(module, folder),
            rows=self._rows,
            rolled_back=self._rolled_back,
            events=self._events,
            summary=summary,
            environment={
                "devices": [name] * trainer.world_size,
                "hostname": platform.node(),
                "module": f"{type(module).__module__}.{type(module).__qualname__}",
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "lightning": lightning.__version__,
                },
            },
            hyperparameters={key: _as_plain(value) for key, value in module.hparams.items()},
        )

    def write_report(self, folder: Path | str) -> None:
        """Call `write_report(folder, dashboard)`, logging exceptions instead of raising them.

        Args:
            folder: Folder of a run with a `metrics.csv`.
        """
        self._write_page(Path(folder), lambda: None)

    def _write_page(self, folder: Path, get_fit: Callable[[], RecordedFit | None]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_report(folder, self._dashboard, fit=get_fit())
        except OSError as error:
            log.error(f"the report of {folder} could not be written: {error}")
        except Exception:
            log.exception("the report of %s could not be written", folder)


def _get_title(module: LightningModule, folder: Path) -> str:
    """Return a title that distinguishes runs; `version_0` of Lightning's loggers is that of every project."""
    if re.fullmatch(r"version_\d+", folder.name) is None:
        return folder.name
    parent = folder.parent.name
    is_default = parent in ("", "lightning_logs", "tb_logs", "csv_logs", "logs")
    return f"{type(module).__name__ if is_default else parent}, {folder.name.replace('_', ' ')}"


def _as_plain(value: Any) -> Any:
    """Return a hyperparameter as YAML can hold it; objects as text."""
    if isinstance(value, Mapping):
        return {str(key): _as_plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(child) for child in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
