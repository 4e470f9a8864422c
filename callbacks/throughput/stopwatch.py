"""A stopwatch with named pauses, and the throughput totals of a run: plain arithmetic, no Lightning."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._dynamo.callback import callback_handler


@dataclass(frozen=True)
class Snapshot:
    """Totals of a run, cumulative or between two snapshots; values that the module does not count are 0."""

    seconds: float = 0.0
    device_seconds: float = 0.0  # summed over all ranks
    wait_seconds: float = 0.0
    excluded_seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    flops: float = 0.0  # attention counted in full, regardless of the causal mask
    causal_flops: float = 0.0  # attention counted at half, for the causal mask
    uncounted: int = 0  # micro-batches with unknown FLOPs

    def __add__(self, other: "Snapshot") -> "Snapshot":
        return Snapshot(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Snapshot") -> "Snapshot":
        return Snapshot(*map(operator.sub, vars(self).values(), vars(other).values()))


def get_rates(window: Snapshot, *, world_size: int) -> dict[str, float]:
    """Return the metrics of one row; only the excluded seconds if the window contains no training."""
    row = {"time/excluded_seconds": window.excluded_seconds}
    if window.seconds <= 0 or not window.steps:
        return row
    row["time/step_seconds"] = window.seconds / window.steps
    row["time/data_wait_fraction"] = window.wait_seconds / window.seconds
    if window.samples:
        row["throughput/samples_per_second"] = window.samples / window.seconds
    if window.tokens:
        tokens_per_second = window.tokens / window.seconds
        row["throughput/tokens_per_second"] = tokens_per_second
        row["throughput/device_tokens_per_second"] = tokens_per_second / world_size
    return row


class Stopwatch:
    """Counts the seconds since `start`, except while any pause is active.

    Args:
        clock: Returns seconds.

    Attributes:
        excluded_seconds: Paused seconds by reason, without the pause still open; overlapping pauses count toward the
            most recent reason.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._running_since: float | None = None
        self._reasons: list[str] = []
        self._paused_since = 0.0  # start of the interval not yet recorded
        self.excluded_seconds: dict[str, float] = {}

    @property
    def is_paused(self) -> bool:
        """Whether any pause is active."""
        return bool(self._reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons of the active pauses."""
        return tuple(self._reasons)

    def start(self) -> None:
        """Start counting."""
        self._running_since = self._clock()

    def pause(self, reason: str, *, at: float | None = None) -> None:
        """Stop counting until `resume` has been called for every reason.

        Args:
            reason: Name under which the pause is recorded.
            at: Time at which the pause began; None means now. Clamped to the last resume, so that no interval is
                excluded twice.
        """
        if self._running_since is not None:
            until = self._clock() if at is None else max(at, self._running_since)
            self._seconds += until - self._running_since
            self._running_since = None
            self._paused_since = until
        else:
            self._record_pause()
        if reason not in self._reasons:
            self._reasons.append(reason)

    def resume(self, reason: str) -> None:
        """End a pause; continue counting if no other is active. Ignored if the reason is not active."""
        if reason not in self._reasons:
            return
        self._record_pause()
        self._reasons.remove(reason)
        if not self._reasons:
            self._running_since = self._paused_since

    def _record_pause(self) -> None:
        """Record the open pause up to now under the most recent reason."""
        since, self._paused_since = self._paused_since, self._clock()
        if self._reasons and self._paused_since > since:
            before = self.excluded_seconds.setdefault(self._reasons[-1], 0.0)
            self.excluded_seconds[self._reasons[-1]] = before + self._paused_since - since

    def seconds(self) -> float:
        """Return the seconds counted so far."""
        if self._running_since is None:
            return self._seconds
        return self._seconds + self._clock() - self._running_since


class CompileListener:
    """Pauses a stopwatch while torch.compile compiles, from construction until `detach`.

    torch reports nested compilations once, as part of the outermost one.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._is_attached = True
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)

    def _on_start(self, *arguments: Any) -> None:  # torch 2.6 passes none
        self._watch.pause("compile")

    def _on_end(self, *arguments: Any) -> None:
        self._watch.resume("compile")

    def detach(self) -> None:
        """Remove the listeners; calling it twice is harmless."""
        if self._is_attached:
            callback_handler.remove_start_callback(self._on_start)
            callback_handler.remove_end_callback(self._on_end)
            self._is_attached = False
