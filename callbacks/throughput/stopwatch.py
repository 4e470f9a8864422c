"""A stopwatch that pauses for named reasons, and what it reads: plain arithmetic, no Lightning."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch._dynamo.callback import callback_handler


@dataclass(frozen=True)
class Snapshot:
    """What a run did, up to or between readings. Zero samples, tokens or FLOPs: nobody counts them."""

    seconds: float = 0.0
    device_seconds: float = 0.0  # of all ranks together
    wait_seconds: float = 0.0
    excluded_seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    flops: float = 0.0  # attention in full
    causal_flops: float = 0.0  # attention at half

    def __add__(self, other: "Snapshot") -> "Snapshot":
        return _combined(self, other, operator.add)

    def __sub__(self, other: "Snapshot") -> "Snapshot":
        return _combined(self, other, operator.sub)


def _combined(one: Snapshot, other: Snapshot, combine: Callable[[Any, Any], Any]) -> Snapshot:
    names = [field.name for field in fields(Snapshot)]
    return Snapshot(**{name: combine(getattr(one, name), getattr(other, name)) for name in names})


class Stopwatch:
    """Seconds since `start`, without the stretches in which anyone had asked for a pause.

    Attributes:
        excluded_seconds: By the reason that began a stretch, or came last in it; without the one that is open.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._running_since: float | None = None
        self._reasons: list[str] = []
        self._paused_since = 0.0  # for the last of them
        self.excluded_seconds: dict[str, float] = {}

    @property
    def is_paused(self) -> bool:
        return bool(self._reasons)

    def start(self) -> None:
        self._running_since = self._clock()

    def pause(self, reason: str, *, at: float | None = None) -> None:
        """Stop counting from `at` (now, if not given) until every reason has been resumed.

        A moment `at` before the last resume counts as that resume: no stretch is left out twice.
        """
        if self._running_since is not None:
            until = self._clock() if at is None else max(at, self._running_since)
            self._seconds += until - self._running_since
            self._running_since = None
            self._paused_since = until
        else:
            self._leave_out()
        if reason not in self._reasons:
            self._reasons.append(reason)

    def resume(self, reason: str) -> None:
        """Go on counting, unless there is another reason to pause or this was never one."""
        if reason not in self._reasons:
            return
        self._leave_out()
        self._reasons.remove(reason)
        if not self._reasons:
            self._running_since = self._paused_since

    def _leave_out(self) -> None:
        """Book what has passed of the open stretch, if anything has."""
        since, self._paused_since = self._paused_since, self._clock()
        if self._reasons and self._paused_since > since:
            before = self.excluded_seconds.setdefault(self._reasons[-1], 0.0)
            self.excluded_seconds[self._reasons[-1]] = before + self._paused_since - since

    def seconds(self) -> float:
        if self._running_since is None:
            return self._seconds
        return self._seconds + self._clock() - self._running_since


class CompileTap:
    """Attached from its making to `detach`. torch tells of one compilation inside another only once."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._is_attached = True
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)

    def _on_start(self, told: Any) -> None:
        self._watch.pause("compile")

    def _on_end(self, told: Any) -> None:
        self._watch.resume("compile")

    def detach(self) -> None:
        """Hear nothing more; harmless the second time."""
        if self._is_attached:
            callback_handler.remove_start_callback(self._on_start)
            callback_handler.remove_end_callback(self._on_end)
            self._is_attached = False
