"""A stopwatch that pauses for named reasons, and what it reads: plain arithmetic, no Lightning."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """What a run did, up to or between readings. Zero samples or tokens: nobody counts them."""

    seconds: float = 0.0
    wait_seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def __add__(self, other: "Reading") -> "Reading":
        return Reading(
            seconds=self.seconds + other.seconds,
            wait_seconds=self.wait_seconds + other.wait_seconds,
            steps=self.steps + other.steps,
            samples=self.samples + other.samples,
            tokens=self.tokens + other.tokens,
        )

    def __sub__(self, other: "Reading") -> "Reading":
        return Reading(
            seconds=self.seconds - other.seconds,
            wait_seconds=self.wait_seconds - other.wait_seconds,
            steps=self.steps - other.steps,
            samples=self.samples - other.samples,
            tokens=self.tokens - other.tokens,
        )


class Stopwatch:
    """Seconds since `start`, without the stretches in which anyone had asked for a pause."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._running_since: float | None = None
        self._reasons: set[str] = set()

    def start(self) -> None:
        self._running_since = self._clock()

    def pause(self, reason: str, *, at: float | None = None) -> None:
        """Stop counting from `at` (now, if not given) until every reason has been resumed.

        A moment `at` before the last resume counts as that resume: no stretch is left out twice.
        """
        self._reasons.add(reason)
        if self._running_since is not None:
            until = self._clock() if at is None else max(at, self._running_since)
            self._seconds += until - self._running_since
            self._running_since = None

    def resume(self, reason: str) -> None:
        """Go on counting, unless there is another reason to pause or this was never one."""
        if reason not in self._reasons:
            return
        self._reasons.remove(reason)
        if not self._reasons:
            self._running_since = self._clock()

    def seconds(self) -> float:
        if self._running_since is None:
            return self._seconds
        return self._seconds + self._clock() - self._running_since
