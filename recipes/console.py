"""What a person reads while a run goes on: one logger to the console and to train.log, known noise left out."""

import logging
import sys
import warnings
from pathlib import Path

LOGGER = logging.getLogger("lightning_recipes")

# Lines that tell a user of these recipes nothing, each with where it comes from.
_NOISY_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",  # device and accelerator banners, tips
    "lightning.pytorch.accelerators.cuda",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.callbacks.model_summary",
    "torch.distributed.elastic.multiprocessing.redirects",
)
_NOISY_WARNINGS = (
    r".*does not have many workers.*",  # Lightning: a memory map needs none
    r".*LeafSpec.*is deprecated.*",  # Lightning 2.6 on torch 2.13, from its use of _pytree
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*resuming from a checkpoint that ended before the epoch ended.*",  # there are no epochs: StreamData resumes
    r".*Found .* module\(s\) in eval mode at the start of training.*",
    r".*GPU available but not used.*",  # the user asked for the CPU
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*The epoch parameter in `scheduler.step\(\)`.*",
    r".*Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`.*",  # a skipped fp16 step
    r".*`isinstance\(treespec.*",
)


class _ConsoleFilter(logging.Filter):
    """Leaves out records meant for the file alone (`extra={"console": False}`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(record, "console", True)


def open_console(log_file: Path | None = None) -> None:
    """Send the run's log to the console and, where a file is named, to it as well; drop known noise."""
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        handler.close()
    console = logging.StreamHandler(sys.stdout)
    console.addFilter(_ConsoleFilter())
    LOGGER.addHandler(console)
    if log_file is not None:
        LOGGER.addHandler(logging.FileHandler(log_file))
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for pattern in _NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
