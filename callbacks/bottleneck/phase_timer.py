"""Time forward and backward passes: with the clock on a CPU, with CUDA events read at logged steps on a GPU."""

from collections.abc import Callable

import torch

Instant = float | torch.cuda.Event
_MAX_PASSES = 256  # newest micro-batches kept: with manual optimization a step may never end here


class PhaseTimes:
    """Records timestamps of the passes of the current optimizer step.

    Args:
        device: Device of the model.
        clock: Returns seconds; only used on a CPU.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._is_cuda = device.type == "cuda"
        self._clock = clock
        self._instants: list[list[Instant]] = []

    def begin(self) -> None:
        """Record the start of a micro-batch."""
        self._instants = [*self._instants[-_MAX_PASSES:], [self._now()]]

    def end_pass(self) -> None:
        """Record the end of a pass: the first call of a micro-batch ends the forward, the second the backward pass."""
        if self._instants:
            self._instants[-1].append(self._now())

    def end_step(self) -> list[list[Instant]]:
        """Return each micro-batch's start, forward end and backward end since the last call."""
        instants, self._instants = self._instants, []
        return instants

    def _now(self) -> Instant:
        if not self._is_cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def read_phases(instants: list[list[Instant]]) -> list[tuple[float, float]]:
    """Return (forward, backward) seconds of each micro-batch; on a GPU the passes must have finished."""
    complete = [of_batch for of_batch in instants if len(of_batch) == 3]
    return [(_seconds_between(a, b), _seconds_between(b, c)) for a, b, c in complete]


def _seconds_between(start: Instant, end: Instant) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event), "one device gives one kind of instant"
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(end, float), "one device gives one kind of instant"
    return end - start
