"""Time a step on this machine by running each distinct operator in isolation, on real tensors of its shapes.

For CPUs, and for GPUs that no table lists. Takes seconds to a minute, and the memory of one operator at a time. An
isolated operator finds its inputs in the cache and is not delayed by its neighbors, so the sum is too small by a
factor that depends on the model; a real step of a shallow copy of the model gives that factor. Excludes communication.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from recipes.blocks import keep_blocks
from recipes.generation import Sampling, generate
from recipes.model import LanguageModel, as_model
from recipes.plan.fake_rank import MeshGroups, autocast, default_dtype
from recipes.plan.roofline import Seconds, StepSeconds
from recipes.plan.step import Step, build_model, clip, hold_frozen_models, record_step
from recipes.plan.trace import Op, cost_of
from recipes.plan.unroll import find_period
from recipes.precision import Precision
from recipes.runtime.console import LOGGER
from recipes.torch_internals import tree_flatten, tree_map

_REAL_STEPS = 8
_TOKENS, _SAMPLED_RUNS = 8, 3  # that are sampled to time one, and how often
_RUNS, _BUDGET_SECONDS = 7, 0.4  # per operator: maximum number of runs, and the time after which no further run starts


class OperatorTimer:
    """Times operators, each distinct one only once.

    Attributes:
        device: Device that they run on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timings: dict[str, tuple[float, float]] = {}  # operator -> seconds, and the bytes that it moved then

    def seconds_of(self, op: Op) -> float:
        """Return the time of a recorded operator in seconds.

        Args:
            op: Recorded with its call. If unrolling has made its tensor lists longer since then, the time is scaled by
                its bytes.
        """
        if op.call is None or op.cost.kind in ("view", "collective"):
            return 0.0
        if op.cost.kind == "transfer" and self.device.type == "cuda":  # overlaps with computation
            return 0.0
        key = _describe_call(op.call)
        if key not in self._timings:
            self._timings[key] = self._measure(op.call)
        seconds, num_bytes = self._timings[key]
        if num_bytes == 0.0 or op.cost.num_bytes == 0.0:
            return seconds
        return seconds * op.cost.num_bytes / num_bytes

    @torch.no_grad()
    def _measure(self, call: Any) -> tuple[float, float]:
        func, args, kwargs = call
        args, kwargs = tree_map(self._make_real, (args, kwargs))
        out = func(*args, **kwargs)  # also warms caches and the allocator
        num_bytes = cost_of(func, args, kwargs, out).num_bytes
        del out
        seconds: list[float] = []
        began = time.perf_counter()
        while len(seconds) < _RUNS and (not seconds or time.perf_counter() - began < _BUDGET_SECONDS):
            _wait(self.device)
            start = time.perf_counter()
            func(*args, **kwargs)
            _wait(self.device)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds), num_bytes

    def _make_real(self, leaf: Any) -> Any:
        """Return a real tensor for a fake one: small positive floats, zero indices or True; other values unchanged."""
        if isinstance(leaf, torch.device):
            return self.device
        if not isinstance(leaf, Tensor):
            return leaf
        with torch.device(self.device):
            real = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
        base = real.as_strided((real.untyped_storage().nbytes() // real.element_size(),), (1,), 0)  # [all elements]
        if leaf.dtype.is_floating_point:
            base.uniform_(0.5, 1.0)  # no denormals, however often it is multiplied
        else:
            base.fill_(leaf.dtype == torch.bool)
        return real


def calibrate(step: Step, kinds: Sequence[object], timer: OperatorTimer) -> float:
    """Return the ratio of step time to the sum of operator times; 1 if the timed step fails, e.g. out of memory.

    Args:
        step: Step on one device.
        kinds: Kind of each block, see `block_kinds`; a model whose blocks do not repeat is run in full.
        timer: Operator timer of the device.
    """
    period = find_period(kinds)
    blocks = None if period is None else [*range(1 + period), len(kinds) - 1]
    try:
        times = sorted(time_real_steps(step, blocks=blocks, device=timer.device, num_steps=_REAL_STEPS))
    except RuntimeError as error:  # torch's allocators raise subclasses of it, or on a CPU the class itself
        reason = str(error).partition("\n")[0][:100]
        LOGGER.info(f"No step of a shallow copy could be timed ({reason}): the times are those of operators alone")
        return 1.0
    ops = record_step(step, blocks=blocks, keep_calls=True)
    # the lower quartile: other load on the machine can only add time
    return times[len(times) // 4] / sum(timer.seconds_of(op) for op in ops)


def time_real_steps(step: Step, *, blocks: Sequence[int] | None, device: torch.device, num_steps: int) -> list[float]:
    """Return the seconds of real steps of a model with few blocks, after one warm-up step.

    Args:
        step: Step to run, on one device.
        blocks: Indices of the blocks to keep; None: all.
        device: Device to run on.
        num_steps: Number of timed steps.

    Raises:
        RuntimeError: The step does not fit into memory.
    """
    seconds: list[float] = []
    with torch.device(device):
        model = build_model(step, blocks, MeshGroups())
        as_model(model).init_weights(0)
        for frozen in hold_frozen_models(step, MeshGroups()):
            as_model(frozen).init_weights(0)
        optimizer = step.make_optimizer(model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for _ in range(num_steps + 1):
            batch = step.make_batch()
            # before the clock starts: a run zeroes gradients once per step, not for every micro-batch
            optimizer.zero_grad(set_to_none=not step.accumulates)
            _wait(device)
            began = time.perf_counter()
            with autocast(step.precision, device.type):
                loss = step.objective(model, batch)
            loss.backward()
            clip(parameters)
            optimizer.step()
            _wait(device)
            seconds.append(time.perf_counter() - began)
    return seconds[1:]


def time_token(
    make_model: Callable[[], nn.Module],
    kinds: Sequence[object],
    *,
    num_rows: int,
    length: int,
    sampling: Sampling,
    precision: Precision,
    device: torch.device,
) -> float | None:
    """Return the seconds in which each row is sampled one more token; None if it fails, e.g. out of memory.

    Rows are sampled for real, by copies with few blocks where these repeat: what one more block takes is the difference
    of two.

    Args:
        make_model: Returns the model, on the current device.
        kinds: Kind of each block, see `block_kinds`.
        num_rows: Rows that are sampled at a time.
        length: Tokens of a row that are in the cache by then.
        sampling: How tokens are drawn.
        precision: Precision of the run.
        device: Device to run on.
    """
    period, last = find_period(kinds), len(kinds) - 1
    depths = [None] if period is None else [[*range(1 + number * period), last] for number in (1, 2)]
    settings: dict[str, Any] = {"sampling": sampling, "precision": precision, "device": device}
    try:
        shortest, *longer = [_time_token(make_model, blocks, num_rows, length, **settings) for blocks in depths]
    except RuntimeError as error:  # torch's allocators raise subclasses of it, or on a CPU the class itself
        reason = str(error).partition("\n")[0][:100]
        LOGGER.info(f"No token of a shallow copy could be sampled ({reason}): the time of rollouts is unknown")
        return None
    if period is None:
        return shortest
    return shortest + max(longer[0] - shortest, 0.0) * ((last - 1) / period - 1)


@torch.no_grad()
def _time_token(
    make_model: Callable[[], nn.Module],
    blocks: Sequence[int] | None,
    num_rows: int,
    length: int,
    *,
    sampling: Sampling,
    precision: Precision,
    device: torch.device,
) -> float:
    """Return the seconds of a token of all rows: the difference between some tokens and one, after the same prompt."""
    with torch.device(device), default_dtype(precision.param_dtype):
        model = make_model()
    if blocks is not None:
        keep_blocks(model, blocks)
    as_model(model).init_weights(0)
    fewest = []
    for num_tokens in (1, 1 + _TOKENS):
        times = []
        for _ in range(_SAMPLED_RUNS):
            _wait(device)
            began = time.perf_counter()
            with autocast(precision, device.type):
                generate(
                    cast(LanguageModel, model),
                    [[0] * max(length - _TOKENS, 1)],
                    num_tokens,
                    sampling=sampling,
                    seeds=range(num_rows),
                    num_samples=num_rows,
                )
            _wait(device)
            times.append(time.perf_counter() - began)
        fewest.append(min(times))  # other load on the machine can only add time
    return max(fewest[1] - fewest[0], 0.0) / _TOKENS


def time_operators(ops: Sequence[Op], timer: OperatorTimer, *, factor: float) -> StepSeconds:
    """Return the seconds of each section, without communication.

    Args:
        ops: Operators of one step, recorded with their calls.
        timer: Operator timer of the device.
        factor: Result of `calibrate`.
    """
    step = StepSeconds()
    for op in ops:
        part = step.sections.setdefault(op.section, Seconds())
        seconds = factor * timer.seconds_of(op)
        part.num_launches += op.cost.num_launches
        if op.cost.kind == "matmul":
            part.matmul += seconds
        elif op.cost.kind == "convolution":
            part.convolution += seconds
        elif op.cost.kind == "attention":
            part.attention += seconds
        else:
            part.memory += seconds
    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _describe_call(call: Any) -> str:
    """Return a string that is equal for calls that take the same time."""
    func, args, kwargs = call
    leaves, tree = tree_flatten((args, kwargs))
    shown = [
        (tuple(leaf.shape), leaf.stride(), str(leaf.dtype)) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    return f"{func} {tree} {shown}"
