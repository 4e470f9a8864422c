"""Estimate step time with a roofline: each operator takes the longer of its arithmetic and its memory traffic.

The assumptions are in `Rates` and are shown with every plan. Not modeled: power limits, network congestion,
stragglers, data loading, the allocator.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import torch

from recipes.plan.trace import Op, is_fusible, is_in_compiled_place


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Achievable rates of a device.

    Attributes:
        tflops: Dense peak by kind of arithmetic: `bf16`, `fp16`, `fp32`.
        bandwidth: Peak memory bandwidth, bytes per second.
        matmul: Fraction of the peak that matrix products achieve, and convolutions with their channels padded to the
            tiles of tensor cores. A convolution of few channels per group takes the float32 peak without them.
        attention: Fraction that fused attention achieves on long sequences, (forward, backward).
        attention_keys: Sequence length at which it achieves half of that, (forward, backward).
        memory: Fraction of the bandwidth that elementwise kernels achieve.
        kernel_seconds: Minimum duration of a kernel on the device.
        launch_seconds: Host time per kernel launch, (eager, compiled).
    """

    tflops: dict[str, float]
    bandwidth: float
    matmul: float
    attention: tuple[float, float]
    attention_keys: tuple[int, int] = (400, 800)
    memory: float = 0.80
    kernel_seconds: float = 2e-6
    launch_seconds: tuple[float, float] = (9e-6, 5e-6)


# Fractions of the dense peak. Measured ceilings of matrix products (stas00/ml-engineering, MAMF): A100 0.87, H100 and
# H200 0.80, B200 0.78; the shapes of a transformer reach about nine tenths of these. Attention: FlashAttention-2 as
# published (arXiv 2307.08691), causal, head size 64 to 128, on the longest sequences. Shorter sequences are slower:
# without a mask, 512 keys reach 0.81 of that rate forward and 0.64 backward (an H100, thread 2688 of
# Dao-AILab/flash-attention). A causal query sees half of its keys on average, and blocks of 128 on the diagonal are
# computed in full, so 1,024 causal keys reach 0.72 and 0.57. `attention_keys` is set to match.
_FRACTIONS: dict[str, tuple[float, tuple[float, float]]] = {
    "A100": (0.78, (0.55, 0.48)),
    "H100": (0.66, (0.40, 0.34)),
    "H200": (0.68, (0.40, 0.34)),
    "B200": (0.65, (0.40, 0.34)),
}
_OTHER = (0.70, (0.45, 0.38))


def get_rates(full_name: str, *, tflops: dict[str, float], bandwidth: float) -> Rates:
    """Return the assumed achievable rates of a device.

    Args:
        full_name: Device name as torch reports it.
        tflops: Dense peak by kind of arithmetic.
        bandwidth: Peak memory bandwidth, bytes per second.
    """
    matmul, attention = next((row for name, row in _FRACTIONS.items() if name in full_name), _OTHER)
    return Rates(tflops=tflops, bandwidth=bandwidth, matmul=matmul, attention=attention)


@dataclass
class Seconds:
    """Time breakdown of part of a step.

    Attributes:
        matmul: Matrix products.
        convolution: Convolutions.
        attention: Fused attention.
        memory: Everything limited by memory traffic.
        waiting: Time in which the device waits for the host to launch kernels.
        num_launches: Kernel launches; may be fractional, as an average over blocks.
    """

    matmul: float = 0.0
    convolution: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    waiting: float = 0.0
    num_launches: float = 0

    @property
    def total(self) -> float:
        """Total time."""
        return self.matmul + self.convolution + self.attention + self.memory + self.waiting

    def add(self, other: "Seconds", *, times: float = 1.0) -> None:
        """Add another breakdown, multiplied by a factor."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + times * getattr(other, part.name))


@dataclass
class StepSeconds:
    """Time breakdown of a step by section."""

    sections: dict[str, Seconds] = field(default_factory=dict)

    def of(self, start: str) -> Seconds:
        """Return the sum over all sections whose name starts with a prefix."""
        total = Seconds()
        for name, part in self.sections.items():
            if name.startswith(start):
                total.add(part)
        return total


def time_step(ops: Sequence[Op], rates: Rates, *, is_compiled: bool) -> StepSeconds:
    """Return the seconds of each section, without communication.

    Args:
        ops: Operators of one step.
        rates: Rates of the device.
        is_compiled: Whether blocks and loss are compiled: adjacent elementwise operators then become one kernel.
    """
    step = StepSeconds()
    fused: list[Op] = []
    for op in ops:
        if op.cost.kind == "transfer":  # overlaps with computation
            continue
        fuses = is_fusible(op.name, op.cost)
        part = step.sections.setdefault(op.section, Seconds())
        # what a sum over all of its values is taken of, such as batch statistics, is written first
        if fused and (fused[0].section != op.section or not fuses or op.cost.reread_bytes):
            _add_fused(step.sections[fused[0].section], fused, rates)
            fused = []
        if fuses and is_compiled and is_in_compiled_place(op.section):
            fused.append(op)
        else:
            _add(part, op, rates)
    if fused:
        _add_fused(step.sections[fused[0].section], fused, rates)
    for name, part in step.sections.items():
        launch = rates.launch_seconds[is_compiled and "/" in name]
        part.waiting = max(part.num_launches * launch - part.total, 0.0)
    return step


def _add(part: Seconds, op: Op, rates: Rates) -> None:
    cost = op.cost
    if cost.num_launches == 0 or cost.kind == "collective":
        return
    part.num_launches += cost.num_launches
    traffic = cost.num_bytes / (rates.bandwidth * rates.memory) + rates.kernel_seconds
    peak = rates.tflops[kind_of(cost.dtype)] * 1e12
    if cost.kind == "matmul":
        part.matmul += max(cost.flops / (peak * rates.matmul), traffic)
    elif cost.kind == "convolution":
        on_tensor_cores = cost.padded_flops / (peak * rates.matmul)
        without = cost.flops / (rates.tflops["fp32"] * 1e12 * rates.matmul)
        part.convolution += max(min(on_tensor_cores, without), traffic)
    elif cost.kind == "attention":
        is_backward = "backward" in op.name
        fraction = rates.attention[is_backward] / (1 + rates.attention_keys[is_backward] / cost.num_keys)
        part.attention += max(cost.flops / (peak * fraction), traffic)
    else:
        part.memory += traffic


def _add_fused(part: Seconds, ops: Iterable[Op], rates: Rates) -> None:
    """Add adjacent elementwise operators as one kernel that reads its external inputs and writes its live outputs."""
    made: set[int] = set()
    traffic = 0.0
    for op in ops:
        traffic += sum(size for number, size in op.reads.items() if number not in made) + op.cost.reread_bytes
        made |= op.writes.keys() | op.reads.keys()
        traffic += sum(size for number, size in op.writes.items() if number not in op.temporary)
    part.num_launches += 1
    part.memory += traffic / (rates.bandwidth * rates.memory) + rates.kernel_seconds


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of arithmetic for a dtype, a key of `Rates.tflops`."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
