"""Leaves curves.png and report.html in the run folder, however a fit ends: a second or two."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ..logged_step import run_folder
from .page import write_report

log = logging.getLogger("lightning_recipes")


class RunReport(Callback):
    """Writes the report of the run folder, on rank 0, when a fit ends or an exception ends it.

    Needs a logger that leaves `metrics.csv` in its `log_dir`; without one, a line in the log says
    so. Call `write_report(folder)` again once `summary.json` is there. A report that cannot be written
    costs the run nothing: the traceback goes to the log and the fit ends as it would have.

    Args:
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`; None: every metric, by its prefix.
    """

    def __init__(self, *, dashboard: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._dashboard = dashboard

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._write(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if trainer.state.fn == "fit":
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()  # rows that wait in memory
        folder = run_folder(trainer)
        if folder is None or not (folder / "metrics.csv").exists():
            if trainer.global_step:
                log.info("no report: no logger left a metrics.csv")
            return
        self.write_report(folder)

    def write_report(self, folder: Path) -> None:
        """`write_report(folder, dashboard)`, with a failure in the log instead of an exception."""
        try:
            write_report(folder, self._dashboard)
        except Exception:
            log.exception("the report of %s could not be written", folder)
