"""How a rank exits: gloo's threads must not find an interpreter that is being finalized."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

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


@pytest.mark.slow
@pytest.mark.fresh_python
def test_torch_still_aborts_ranks_that_exit_by_sys_exit(tmp_path: Path) -> None:
    """pytorch #190489: one rank in four. When this fails, `exit_process` may be `sys.exit`."""
    ended = (exit_codes("sys.exit(75)", tmp_path, attempt) for attempt in range(20))
    assert any(code == -signal.SIGABRT for codes in ended for code, _ in codes)
