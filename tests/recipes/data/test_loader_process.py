"""Real signals to a loader process, from its rank and from another process."""

import multiprocessing
import os
import signal
import subprocess
import time

import pytest
from torch.utils.data import DataLoader

from recipes.data.datamodule import ignore_group_signals

SECONDS = 10.0


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_loader_process_ignores_foreign_signals_and_ends_at_sigterm_of_its_rank(
    name: str,
) -> None:
    loader = DataLoader(
        range(100),  # type: ignore[arg-type]
        batch_size=1,
        num_workers=1,
        worker_init_fn=ignore_group_signals,
        persistent_workers=True,
    )
    batches = iter(loader)
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
