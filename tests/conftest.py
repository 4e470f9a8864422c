"""Fixtures of every test: one thread, a cache of its own and no leftover log handlers."""

import logging
import os
from collections.abc import Iterator

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from slurm_cluster import Cluster
from slurm_install import missing
from support import write_texts

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the token caches of tests apart from those of the user."""
    os.environ["RECIPES_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of 24 small texts with structure to learn, the same on every machine."""
    return str(write_texts(tmp_path_factory.getbasetemp() / "texts"))


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Remove the log handlers that a test has opened."""
    yield
    logger = logging.getLogger("lightning_recipes")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a real SLURM on this machine, for the tests of one file."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.end()
    assert cluster.living() == []
