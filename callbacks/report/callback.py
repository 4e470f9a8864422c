"""Write curves.png and report.html into the run folder, however a fit ends. Takes a second or two."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from ..logged_step import run_folder
from .page import write_report

log = logging.getLogger("lightning_recipes")


class RunReport(Callback):
    """Writes the report of the run folder, on rank 0, when a fit ends or raises.

    Needs a logger that writes `metrics.csv` into its `log_dir`; without one it logs that there is no report. Call
    `write_report(folder)` again once `summary.json` exists. If the report cannot be written, the traceback is logged
    and the fit ends as it would have without it.

    Args:
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`; None draws every metric, by its prefix.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(max_steps=1000, callbacks=[RunReport()])
    """

    def __init__(self, *, dashboard: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._dashboard = dashboard

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._write(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit":
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()  # flush buffered rows
        folder = run_folder(trainer)
        if folder is None or not (folder / "metrics.csv").exists():
            if trainer.global_step:
                log.info("no report: no logger wrote a metrics.csv")
            return
        self.write_report(folder)

    def write_report(self, folder: Path) -> None:
        """Call `write_report(folder, dashboard)` and log an exception instead of raising it."""
        try:
            write_report(folder, self._dashboard)
        except Exception:
            log.exception("the report of %s could not be written", folder)
