"""Start the ranks of a group of cases and collect their results."""

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
) -> dict[str, Any]:
    """Run every case in one process group of `world_size` real processes; return rank 0's results by name."""
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
        "RECIPES_RANK_FILE": str(cases_file),  # marks these processes as ranks: no further spawn
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
    results: dict[str, Any] = json.loads(results_file.read_text())
    return results


def _wait(processes: list[subprocess.Popen[bytes]], *, timeout_seconds: float) -> list[int | None]:
    """Return the exit statuses; None: the rank still waits for another one, which has died.

    Raises:
        TimeoutError: No rank has died, and some still run.
    """
    ends = time.monotonic() + timeout_seconds
    while time.monotonic() < ends:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return codes
        if any(codes):
            ends = min(ends, time.monotonic() + 5)  # the others may be about to say why
        time.sleep(0.05)
    if any(codes):
        return codes
    raise TimeoutError(f"ranks have run for {timeout_seconds:.0f} s: exit statuses {codes}")
