"""Write curves.png and report.html to the run folder when a fit ends or raises; takes a second or two."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from ..lightning_internals import Row, RowTap, as_floats
from ..logged_step import completed_steps, output_folder
from ..protocols import SupportsRow
from .page import write_report

log = logging.getLogger("lightning_recipes")


class RunReport(Callback):
    """Writes the run's report on rank 0 when a fit ends or raises.

    Records the rows of this fit itself, with or without loggers, and writes to the `log_dir` of the first logger that
    has one, else to `trainer.default_root_dir`. If the module is a `SupportsRow`, it reads `metrics.csv` there
    instead, which includes the rows before a resume. Call `write_report(folder)` again once `summary.json` exists. If
    the report cannot be written, the traceback is logged and the fit is not affected.

    Args:
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`; None draws all metrics, grouped by prefix.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(max_steps=1000, callbacks=[RunReport()])
    """

    def __init__(self, *, dashboard: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._dashboard = dashboard
        self._rows: dict[int, dict[str, float]] | None = None  # by step; None if read from metrics.csv
        self._tap: RowTap | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = None
        if trainer.is_global_zero and not isinstance(pl_module, SupportsRow):
            self._rows = {}
            self._tap = RowTap(trainer, lambda row: self._keep(trainer, row))

    def _keep(self, trainer: Trainer, row: Row) -> None:
        assert self._rows is not None, "the tap is set with the rows"
        kept = self._rows.setdefault(completed_steps(trainer), {})
        kept |= row.metrics
        # LearningRateMonitor writes to the loggers directly, in an earlier hook of the step
        kept |= as_floats({name: v for name, v in trainer.callback_metrics.items() if name.startswith("lr-")})

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._write(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit":
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if self._tap is not None:
            self._tap.detach()
            self._tap = None
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()  # flush buffered rows
        folder = output_folder(trainer)
        if self._rows is None and (folder / "metrics.csv").exists():
            self.write_report(folder)
        elif self._rows and any(self._rows.values()):
            self.write_report(folder, self._rows)
        elif trainer.global_step:
            log.info("no report: nothing was logged")

    def write_report(self, folder: Path | str, rows: Mapping[int, Mapping[str, float]] | None = None) -> None:
        """Call `write_report(folder, dashboard)`, logging exceptions instead of raising them.

        Args:
            folder: Folder to write to.
            rows: Metrics by optimizer step; None reads `metrics.csv`.
        """
        try:
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            write_report(folder, self._dashboard, rows=rows)
        except OSError as error:
            log.error(f"the report of {folder} could not be written: {error}")
        except Exception:
            log.exception("the report of %s could not be written", folder)
