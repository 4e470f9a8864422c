"""Seconds of forward and backward passes: clock readings on a CPU, events on a GPU, read when a row is due."""

from collections.abc import Callable

import torch

Moment = float | torch.cuda.Event
_MAX_PASSES = 256  # the newest of a step, or of a run whose steps nobody tells


class Phases:
    """The moments of one optimizer step: for each micro-batch its start, the end of its forward pass, and of its
    backward pass."""

    def __init__(self, moments: list[list[Moment]]) -> None:
        self._moments = moments

    def read(self) -> list[tuple[float, float]]:
        """Seconds forward and backward of each micro-batch; on a GPU of work that is done."""
        whole = [moments for moments in self._moments if len(moments) == 3]
        return [(_between(a, b), _between(b, c)) for a, b, c in whole]


class PhaseTimes:
    """Marks the moments of the step under way.

    Args:
        device: Where the model is.
        clock: Seconds, for a CPU.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._is_cuda = device.type == "cuda"
        self._clock = clock
        self._moments: list[list[Moment]] = []

    def begin(self) -> None:
        self._moments = [*self._moments[-_MAX_PASSES:], [self._now()]]

    def end_forward(self) -> None:
        if self._moments:
            self._moments[-1].append(self._now())

    def end_backward(self) -> None:
        if self._moments:
            self._moments[-1].append(self._now())

    def end_step(self) -> Phases:
        """What was marked since the last one."""
        phases, self._moments = Phases(self._moments), []
        return phases

    def _now(self) -> Moment:
        if not self._is_cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(start: Moment, end: Moment) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event), "one device gives one kind of moment"
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(end, float), "one device gives one kind of moment"
    return end - start
