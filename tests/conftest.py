"""Fixtures for every test: one thread, a separate cache, and no leftover log handlers."""

import gc
import logging
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import recipes  # noqa: F401, I001  # before Lightning, which then imports torchvision beside a CPU build of torch

import pytest
import torch
import warm_python
from browser import Chromium, Tab
from slurm_cluster import Cluster
from slurm_install import missing
from support import write_texts

torch.set_num_threads(1)
warm_python.patch()
# a shell starts background jobs with Ctrl-C ignored, and every rank started by a test would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# DeepSpeed must always use this environment's ninja: a different one would recompile everything
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# cache DeepSpeed's compiled operators with the environment
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")


# a test file that mentions one of these starts processes
_STARTS_PROCESSES = re.compile(
    r"\b(subprocess|multiprocessing|run_train|run_on_ranks|nbclient|Started|Sweeps|Killer|Browser|slurm|os\.fork)\b"
)
_STARTERS = {"run_group", "rows", "results", "browser", "sweeps", "slurm"}  # fixtures that start processes


# pytest-xdist distributes files, so the longest go first: otherwise one worker is idle while another finishes its last
_LONGEST = (
    "benchmarks/test_gpu_check.py",
    "test_train.py",
    "test_debug.py",
    "recipes/launcher/test_slurm.py",
    "recipes/runtime/test_signals.py",
    "recipes/sweep/test_sweep.py",
    "test_conf.py",
    "recipes/logger/test_wandb.py",
    "recipes/entry/test_run.py",
    "recipes/mode/test_wandb_sweep.py",
    "recipes/entry/test_out_of_memory.py",
    "recipes/test_loss_spike.py",
    "recipes/sweep/test_optuna_sweeper.py",
    "recipes/strategy/test_upstream.py",
    "recipes/entry/test_torchrun_restart.py",
)

# [beginning of an id, every how many of those cases stays in `make test`; 0 if none does]
_SLOW = [
    (line.removeprefix(first).strip(), {"+": 1, "-": 0}.get(first) or int(first.partition("/")[2] or 0))
    for line in (Path(__file__).parent / "slow.txt").read_text().splitlines()
    if not line.startswith("#")
    for first in line.split(" ", 1)[:1]
]
_HEAVY = {line for line in (Path(__file__).parent / "heavy.txt").read_text().splitlines() if not line.startswith("#")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test-fast` excludes, and run the longest files first."""
    tests = Path(__file__).parent
    starts: dict[Path, bool] = {}
    num_listed: Counter[int] = Counter()
    for item in items:
        if item.path not in starts:
            starts[item.path] = bool(_STARTS_PROCESSES.search(item.path.read_text()))
        if starts[item.path] or _STARTERS & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
        if item.path.relative_to(tests).as_posix() in _HEAVY:
            item.add_marker("heavy")
        listed = [number for number, (start, _) in enumerate(_SLOW) if item.nodeid.startswith(start)]
        if listed:
            every = _SLOW[listed[-1]][1]
            if not every or num_listed[listed[-1]] % every:
                item.add_marker("slow")
            num_listed[listed[-1]] += 1
    longest = [tests / name for name in _LONGEST]
    items.sort(key=lambda item: longest.index(item.path) if item.path in longest else len(longest))


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name a case by its argument instead of the bytes of a file: an archive holds the second in which it was made.

    Workers of pytest-xdist that collect in different seconds would otherwise disagree on the names.
    """
    return argname if isinstance(val, bytes) and len(val) > 16 else None


def pytest_collection_finish() -> None:
    """Collect garbage less often: a tenth of the time of tests that train or plan in this process went there."""
    gc.collect()
    gc.freeze()  # what was imported and collected
    gc.set_threshold(20_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    """Import what started processes need, in parallel with collection; pytest-xdist workers share one server."""
    if hasattr(config, "workerinput"):
        warm_python.State.address = config.workerinput["warm_python_address"]
        # threads of two workers that contend for the same cores take up to nine times as long as one thread
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    elif "not processes" not in config.option.markexpr:
        warm_python.start()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the server's address to a pytest-xdist worker."""
    node.workerinput["warm_python_address"] = warm_python.State.address


def pytest_unconfigure() -> None:
    warm_python.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Enable warm Python, unless the test needs a fresh one, before any fixture starts a process."""
    warm_python.State.is_on = item.get_closest_marker("fresh_python") is None


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep token caches of tests separate from the user's."""
    os.environ["RECIPES_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of 24 small texts with learnable structure, identical on every machine."""
    return str(write_texts(tmp_path_factory.getbasetemp() / "texts"))


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Remove the log handlers that a test has added."""
    yield
    logger = logging.getLogger("lightning_recipes")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a real SLURM cluster on this machine for the tests in one file."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.end()
    assert cluster.living() == []


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """Start the browser once for all tests."""
    started = Chromium(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def tab(chromium: Chromium) -> Iterator[Tab]:
    """Open a separate tab for each test, so that pointer, zoom and console are not shared."""
    opened = chromium.new_tab()
    yield opened
    opened.close()
