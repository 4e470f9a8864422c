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
    "lightning.fabric.utilities.distributed",  # "Initializing distributed", one line a rank
    "lightning.pytorch.callbacks.model_summary",
    "lightning.pytorch.strategies.deepspeed",  # "initializing deepspeed distributed", one line a rank
    "lightning.pytorch.trainer.connectors.signal_connector",  # the launcher says what was asked of it
    "torch.distributed.elastic.multiprocessing.redirects",
)
_NOISY_WARNINGS = (
    r".*does not have many workers.*",  # Lightning: a memory map needs none
    r".*LeafSpec.*is deprecated.*",  # Lightning 2.6 on torch 2.13, from its use of _pytree
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*resuming from a checkpoint that ended before the epoch ended.*",  # a stream has no epochs
    r".*Found .* module\(s\) in eval mode at the start of training.*",
    r".*The `srun` command is available on your system but is not used.*",  # nobody said it should
    r".*GPU available but not used.*",  # the user asked for the CPU
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*The epoch parameter in `scheduler.step\(\)`.*",
    r".*Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`.*",  # a skipped fp16 step
    r".*`isinstance\(treespec.*",
    r".*Since DeepSpeed handles gradient clipping internally.*",  # as the task knows
    r".*`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated.*",  # torch's own use
    r".*`broadcast_buffers` is deprecated.*",  # torch, of an argument that its successor does not replace yet
    r".*It is recommended to use `self.log\(.*sync_dist=True.*",  # the task adds over ranks itself
)


class _ConsoleFilter(logging.Filter):
    """Leaves out records meant for the file alone (`extra={"console": False}`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(record, "console", True)


def open_console(log_file: Path | None = None, *, speaks: bool = True) -> None:
    """Send the run's log to the console and, where a file is named, to it as well; drop known noise.

    Args:
        log_file: Keeps what the console shows.
        speaks: False in all ranks but one: their news are the same, and only warnings are shown.
    """
    LOGGER.setLevel(logging.INFO if speaks else logging.WARNING)
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
