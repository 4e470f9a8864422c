"""Only one line of DeepSpeed is dropped, and only meanwhile."""

import logging

import pytest

from recipes.numerics.deepspeed_import import without_warning_of_deepspeed


def test_only_the_warning_that_there_is_no_gpu_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)  # it propagates to none, once DeepSpeed is imported
    try:
        with without_warning_of_deepspeed():
            logger.warning("Setting accelerator to CPU. If you have GPU …")
            logger.warning("another")
        logger.warning("Setting accelerator to CPU, later")
    finally:
        logger.removeHandler(caplog.handler)
    shown = list(dict.fromkeys(record.getMessage() for record in caplog.records))
    assert shown == ["another", "Setting accelerator to CPU, later"]
