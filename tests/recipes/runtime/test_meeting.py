"""Ranks that nobody starts are named after seconds, with what to type; real stores on this machine."""

import logging
import socket
import subprocess
import sys
import threading
import time

import pytest
from support import ROOT

from recipes.runtime import meeting
from recipes.runtime.meeting import describe_missing, meet
from recipes.runtime.world import Ranks

TWO = Ranks(per_node=2, num_nodes=1, started_by="slurm")
JOIN = """
import sys
from recipes.runtime.meeting import meet
from recipes.runtime.world import Ranks
meet(Ranks(per_node=2, num_nodes=1, started_by="slurm"), address="127.0.0.1", port=int(sys.argv[1]))
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def test_a_wait_names_the_missing_ranks_and_ends_when_they_have_come(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "ANNOUNCE_SECONDS", 0.1)
    for name, value in {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    started: list[subprocess.Popen[bytes]] = []

    def start_the_other_one() -> None:
        until = time.monotonic() + 10
        while not caplog.messages and time.monotonic() < until:
            time.sleep(0.01)
        monkeypatch.setenv("SLURM_PROCID", "1")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        started.append(subprocess.Popen([sys.executable, "-c", JOIN, str(port)]))

    caplog.set_level(logging.WARNING, logger="lightning_recipes")
    thread = threading.Thread(target=start_the_other_one)
    thread.start()
    meet(TWO, address="127.0.0.1", port=port)
    thread.join()
    assert started[0].wait(60) == 0
    assert caplog.messages[0] == (
        f"Waiting for rank 1 of 2; started so far on {socket.gethostname()};"
        " if srun does not start them, as in an interactive shell: ignore_slurm=true"
    )


def test_a_rank_without_rank_0_names_its_address_and_gives_up(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "ANNOUNCE_SECONDS", 0.05)
    caplog.set_level(logging.WARNING, logger="lightning_recipes")
    with pytest.raises(TimeoutError, match=f"127.0.0.1:{port}, which is not reachable: Connection refused"):
        meeting.reach("127.0.0.1", port, rank=1, starter="torchrun", deadline=time.monotonic() + 0.2)
    assert "variables left over from torchrun: unset RANK WORLD_SIZE LOCAL_RANK" in caplog.messages[0]


def test_a_name_that_does_not_resolve_within_its_time_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")  # as `socket` does, without a number

    monkeypatch.setattr(socket, "create_connection", time_out)
    with pytest.raises(TimeoutError, match="node0:29500, which is not reachable: timed out; "):
        meeting.reach("node0", 29500, rank=1, starter="slurm", deadline=time.monotonic() - 1)


def test_many_missing_ranks_are_counted() -> None:
    text = describe_missing(list(range(4, 64)), 64, ["node0"], "slurm")
    assert text.startswith("Waiting for ranks 4, 5, 6, 7, 8, 9, 10, 11 and 52 more of 64; started so far on node0; ")
