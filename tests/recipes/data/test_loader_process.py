"""Real signals to a loader process, from its rank and from another process."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time

import pytest

from recipes.data.loader_process import SignalProofLoader

SECONDS = 10.0
AT_FORK = {"starts_thread": False}


def _start_thread() -> None:
    """Start a thread before anything of torch runs, as OpenTelemetry does in whatever W&B's process forks."""
    if AT_FORK["starts_thread"]:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


os.register_at_fork(after_in_child=_start_thread)


@pytest.mark.parametrize("name", ["TERM", "USR1"])
@pytest.mark.parametrize("has_threads", [False, True])
def test_a_loader_process_ignores_foreign_signals_and_ends_at_sigterm_of_its_rank(
    name: str, has_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AT_FORK, "starts_thread", has_threads)
    loader = SignalProofLoader(range(100), batch_size=1, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert next(batches).tolist() == [0]
    [worker] = multiprocessing.active_children()
    assert worker.pid is not None
    subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    time.sleep(0.2)
    assert [int(batch) for batch in batches] == list(range(1, 100))
    assert worker.is_alive()
    os.kill(worker.pid, signal.SIGTERM)
    until = time.monotonic() + SECONDS
    while worker.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert not worker.is_alive()
