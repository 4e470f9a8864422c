"""Run a worker script on several ranks and collect its results."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "run_cases.py"


def run_on_ranks(
    cases: dict[str, Any],
    *,
    world_size: int,
    folder: Path,
    timeout_seconds: float = 580.0,
    worker: Path = WORKER,
) -> Any:
    """Run `worker` on `world_size` real processes in one process group; return the JSON written by rank 0.

    Args:
        cases: Input for the worker.
        world_size: Number of ranks.
        folder: Folder for input, results and logs.
        timeout_seconds: Time limit for all ranks together.
        worker: Script that each rank runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cases_file, results_file = folder / "cases.json", folder / "results.json"
    cases_file.write_text(json.dumps(cases))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "RECIPES_RANK_FILE": str(cases_file),  # any value marks the process as a rank, which spawns no ranks itself
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    command = [sys.executable, str(worker), str(cases_file), str(results_file)]
    logs = [folder / f"rank_{rank}.log" for rank in range(world_size)]
    processes = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = _wait(processes, timeout_seconds=timeout_seconds)
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), f"exit statuses {codes}\n" + "\n".join(log.read_text()[-3000:] for log in logs)
    return json.loads(results_file.read_text())


def _wait(processes: list[subprocess.Popen[bytes]], *, timeout_seconds: float) -> list[int | None]:
    """Return the exit codes; None for a rank that was still running, usually blocked on a rank that died.

    Raises:
        TimeoutError: Some ranks are still running, and none has failed.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return codes
        if any(codes):
            deadline = min(deadline, time.monotonic() + 5)  # the others may be about to report why
        time.sleep(0.05)
    if any(codes):
        return codes
    raise TimeoutError(f"ranks have run for {timeout_seconds:.0f} s: exit statuses {codes}")
