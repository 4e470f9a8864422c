"""Import torchao without its warnings about kernels for other machines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_warnings_of_torchao() -> Iterator[None]:
    """Suppress the import warnings of torchao (0.18) about kernels for GPUs that are absent."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
