"""Seconds of a step on this machine: each distinct operator of it is run alone, on real tensors of its shapes.

Serves CPUs, and GPUs that no table knows. Seconds to a minute, and the memory of one operator at a time. Not in it:
what lies between the operators, which is little where they are long, and communication.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from recipes.plan.cost import cost_of
from recipes.plan.roofline import Seconds, StepSeconds
from recipes.plan.trace import Op

_RUNS, _BUDGET_SECONDS = 7, 0.4  # of one operator: at most so many runs, and no further one after so long


@dataclass(frozen=True)
class _Timing:
    """How long an operator takes, and the bytes that it then moves."""

    seconds: float
    num_bytes: float


class OperatorTimer:
    """Times operators, each distinct one once.

    Args:
        device: Where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timings: dict[str, _Timing] = {}

    def seconds_of(self, op: Op) -> float:
        """Return the seconds of a recorded operator.

        Args:
            op: Recorded with its call. Where more repeats of a block have made its lists longer since then, its time
                grows with its bytes.
        """
        if op.call is None or op.cost.kind in ("view", "collective"):
            return 0.0
        key = _describe_call(op.call)
        if key not in self._timings:
            self._timings[key] = self._measure(op.call)
        timing = self._timings[key]
        if timing.num_bytes == 0.0 or op.cost.num_bytes == 0.0:
            return timing.seconds
        return timing.seconds * op.cost.num_bytes / timing.num_bytes

    @torch.no_grad()
    def _measure(self, call: Any) -> _Timing:
        func, args, kwargs = call
        args, kwargs = tree_map(self._make_real, (args, kwargs))
        out = func(*args, **kwargs)  # also warms caches and the allocator
        num_bytes = cost_of(func, args, kwargs, out).num_bytes
        del out
        seconds: list[float] = []
        began = time.perf_counter()
        while len(seconds) < _RUNS and (not seconds or time.perf_counter() - began < _BUDGET_SECONDS):
            self._wait()
            start = time.perf_counter()
            func(*args, **kwargs)
            self._wait()
            seconds.append(time.perf_counter() - start)
        return _Timing(seconds=statistics.median(seconds), num_bytes=num_bytes)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _make_real(self, leaf: Any) -> Any:
        """Return a tensor with storage for a fake one: small positive numbers, index 0, True; others as they are."""
        if isinstance(leaf, torch.device):
            return self._device
        if not isinstance(leaf, Tensor):
            return leaf
        with torch.device(self._device):
            real = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
        base = real.as_strided((real.untyped_storage().nbytes() // real.element_size(),), (1,), 0)  # [all elements]
        if leaf.dtype.is_floating_point:
            base.uniform_(0.5, 1.0)  # no denormals, however often it is multiplied
        else:
            base.fill_(leaf.dtype == torch.bool)
        return real


def time_operators(ops: Sequence[Op], timer: OperatorTimer) -> StepSeconds:
    """Return the seconds of each section, without communication.

    Args:
        ops: Of one step, recorded with their calls.
        timer: For the device.
    """
    step = StepSeconds()
    for op in ops:
        part = step.sections.setdefault(op.section, Seconds())
        seconds = timer.seconds_of(op)
        part.num_launches += op.cost.num_launches
        if op.cost.kind == "matmul":
            part.matmul += seconds
        elif op.cost.kind == "attention":
            part.attention += seconds
        else:
            part.memory += seconds
    return step


def _describe_call(call: Any) -> str:
    """Return a text that is equal for calls that take equally long."""
    func, args, kwargs = call
    leaves, tree = tree_flatten((args, kwargs))
    shown = [
        (tuple(leaf.shape), leaf.stride(), str(leaf.dtype)) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    return f"{func} {tree} {shown}"
