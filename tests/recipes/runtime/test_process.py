"""How a rank exits: gloo's threads must not find an interpreter that is being finalized."""

import inspect
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from support import ROOT

from recipes.runtime import process

RANK = """
import atexit, sys
import torch, torch.distributed as dist
from recipes.runtime.process import exit_process
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
atexit.register(print, "done at the end")
for _ in range(200):
    dist.broadcast(torch.zeros(8), 0)
{end}
"""


def exit_codes(end: str, folder: Path, attempt: int) -> list[tuple[int, str]]:
    """Return the exit codes and outputs of two ranks that end right after a collective."""
    script = folder / "rank.py"
    script.write_text(RANK.format(end=end))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / f"{attempt}")],
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, outputs, strict=True)]


def test_a_rank_exits_with_its_code_after_its_atexit_functions(tmp_path: Path) -> None:
    for attempt in range(4):
        assert exit_codes("exit_process(75)", tmp_path, attempt) == [(75, "done at the end\n")] * 2


def test_closed_streams_do_not_change_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`train.py >&-` leaves None, a wrapper may leave a stream that it has closed."""
    closed = (tmp_path / "console").open("w")
    closed.close()
    for stdout, stderr in ((None, None), (closed, None), (None, closed)):
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(SystemExit) as ended:
            process.exit_process(0)
        assert ended.value.code == 0


class Exited(BaseException):
    """The process would have ended here."""


@pytest.fixture
def exited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Make this process a rank of a group that passes for NCCL's; record its exit functions, then its exit code."""
    record: list[Any] = []

    def leave(exit_code: int) -> None:
        record.append(exit_code)
        if threading.current_thread() is threading.main_thread():
            raise Exited

    def destroy_process_group() -> None:
        """Stand in for what Lightning registers; for NCCL it waits for all ranks."""
        record.append("waits for its peers" if dist.is_initialized() else "has no group")

    monkeypatch.setattr(process.atexit, "_run_exitfuncs", destroy_process_group)
    monkeypatch.setattr(process.os, "_exit", leave)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    yield record
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.cancel()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_rank_that_has_failed_waits_for_no_peer(exited: list[Any]) -> None:
    """They may wait for it in an all-reduce, and torchrun ends them when it sees this one end."""
    with pytest.raises(Exited):
        process.exit_process(1)
    assert exited == ["has no group", 1]


def test_ranks_that_have_finished_end_their_group_together(exited: list[Any]) -> None:
    with pytest.raises(Exited):
        process.exit_process(0)
    assert exited == ["waits for its peers", 0]


def test_a_rank_that_has_failed_ends_even_if_an_exit_function_hangs(
    exited: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_EXIT_SECONDS", 0.05)
    monkeypatch.setattr(process.atexit, "_run_exitfuncs", lambda: time.sleep(0.5))
    with pytest.raises(Exited):
        process.exit_process(3)
    assert exited == [3, 3], "first from the timer"


def test_lightning_still_destroys_an_nccl_group_at_exit() -> None:
    """2.6.6: if this fails, `exit_process` need not abort it."""
    source = inspect.getsource(_init_dist_connection)
    assert 'torch_distributed_backend == "nccl"' in source
    assert "atexit.register(_destroy_dist_connection)" in source


@pytest.mark.slow
@pytest.mark.fresh_python
def test_torch_still_aborts_ranks_that_exit_by_sys_exit(tmp_path: Path) -> None:
    """pytorch #190489: one rank in four. When this fails, `exit_process` may be `sys.exit`."""
    ended = (exit_codes("sys.exit(75)", tmp_path, attempt) for attempt in range(20))
    assert any(code == -signal.SIGABRT for codes in ended for code, _ in codes)
