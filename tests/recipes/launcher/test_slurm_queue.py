"""`Queue` with a fake squeue: states of SLURM and exit code files become exit codes; a squeue that fails."""

import os
from pathlib import Path

import pytest

from recipes.errors import ConfigError
from recipes.launcher import slurm
from recipes.launcher.slurm import Queue


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file whose content a fake squeue prints; while there is none, squeue fails."""
    answer = tmp_path / "answer"
    script = tmp_path / "bin" / "squeue"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\ncat {answer}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_QUERY_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "_FILE_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "_NO_ANSWER_SECONDS", 0.0)
    return answer


@pytest.mark.parametrize(
    ("state", "code", "exit_code"),
    [
        ("PENDING", None, None), ("RUNNING", None, None), ("COMPLETING", "75", None),
        ("COMPLETED", "0", 0), ("FAILED", "101", 1), ("FAILED", "171", 71), ("FAILED", "103", 3),
        ("FAILED", "137", -9), ("CANCELLED", None, -9), ("TIMEOUT", "75", -9), ("NODE_FAIL", None, -9),
        ("COMPLETED", None, 0), ("FAILED", None, -9), (None, "0", 0), (None, None, -9),
    ],
)  # fmt: skip
def test_a_state_and_an_exit_code_file_give_the_exit_code_of_the_run(
    squeue: Path, tmp_path: Path, state: str | None, code: str | None, exit_code: int | None
) -> None:
    squeue.write_text("" if state is None else f"7_0|{state}\n")
    if code is not None:
        (tmp_path / "code_7_0").write_text(f"{code}\n")
    assert Queue(tmp_path).worst_exit_code("7_0") == exit_code


def test_while_squeue_fails_a_job_has_no_exit_code(squeue: Path, tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    assert queue.worst_exit_code("7") is None
    with pytest.raises(ConfigError, match="squeue does not answer, and 7 may be running"):
        queue.select_open(["7"])
    squeue.write_text("7|RUNNING\n")
    assert queue.select_open(["7"]) == {"7"}
    squeue.unlink()
    assert queue.worst_exit_code("7") is None, "by the last answer it was running"


def test_jobs_that_run_or_left_an_exit_code_are_open_and_cancelled_ones_are_not(squeue: Path, tmp_path: Path) -> None:
    squeue.write_text("1|PENDING\n2|RUNNING\n3|COMPLETED\n4|CANCELLED\n5|FAILED\n")
    (tmp_path / "code_3").write_text("0\n")
    names = ["1", "2", "3", "4", "5", "6"]
    assert Queue(tmp_path).select_open(names) == {"1", "2", "3"}
    assert (tmp_path / "calls").read_text().split() == ["called"], "one query for all jobs"
