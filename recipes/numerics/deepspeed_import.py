"""Let transformers import DeepSpeed without its warning that there is no GPU."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NO_GPU = "Setting accelerator to CPU"


@contextmanager
def without_warning_of_deepspeed() -> Iterator[None]:
    """Drop what DeepSpeed (0.19) logs on a machine without a GPU: `save_pretrained` of transformers imports it."""
    logger = logging.getLogger("DeepSpeed")  # whose level DeepSpeed sets when it is imported
    logger.addFilter(_is_news)
    try:
        yield
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return _NO_GPU not in record.getMessage()
