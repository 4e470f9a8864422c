"""Where a run leaves its files: what the first logger that has a folder says. Costs nothing."""

from pathlib import Path

from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path | None:
    """The `log_dir` of the first of `trainer.loggers` that has one; None if there is none."""
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None)
        if isinstance(folder, (str, Path)):
            return Path(folder)
    return None
