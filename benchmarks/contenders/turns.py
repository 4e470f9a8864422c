"""How two trainings take turns: each waits for a line before every few steps, and reports their seconds at its end."""

import json
import resource
import sys
import time
from typing import Any

import torch

READY = "waits for its turn"


class Turns:
    """Measures steps from begin to begin, without the time that others had in between.

    Args:
        num_steps: Steps of a turn.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._seconds: list[float] = []
        self._cpu_seconds: list[float] = []
        self._began: tuple[float, float] | None = None

    def tick(self) -> None:
        """Note that a step begins, and wait if another turn does."""
        if self._began is not None:
            self._seconds.append(time.perf_counter() - self._began[0])
            self._cpu_seconds.append(time.process_time() - self._began[1])
        if len(self._seconds) % self._num_steps == 0:
            print(READY, flush=True)
            if not sys.stdin.readline():
                raise EOFError("the comparison has ended, and this training with it")
        self._began = time.perf_counter(), time.process_time()

    def report(self, rewards: list[float]) -> None:
        """Print, as the last line of this process, the seconds of each step and the mean rewards of each."""
        found: dict[str, Any] = {
            "seconds": self._seconds,
            "cpu_seconds": self._cpu_seconds,
            "rewards": rewards,
            "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }
        print(json.dumps(found), flush=True)
