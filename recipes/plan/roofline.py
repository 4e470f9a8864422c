"""Roofline estimate of step time: each operator takes the longer of its arithmetic and its memory traffic.

Assumptions are in `Rates` and shown with every plan. Not modeled: power limits, congested networks, stragglers, data
loading, the allocator.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import torch

from recipes.plan.trace import Op

_FUSES_NOT = ("embedding", "_fused_", "_foreach_", "index", "nll_loss", "storage")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Achievable rates of a device.

    Attributes:
        tflops: Dense peak by kind of arithmetic: `bf16`, `fp16`, `fp32`.
        bandwidth: Peak of its memory, bytes per second.
        matmul: Fraction of the peak that matrix products reach.
        attention: Fraction that fused attention reaches on long sequences, in the forward and in the backward pass.
        attention_keys: Length of a sequence with which it reaches half of that, likewise.
        memory: Fraction of the bandwidth that elementwise kernels reach.
        kernel_seconds: Least time of a kernel on the device.
        launch_seconds: Time in which the host starts a kernel, eager and compiled.
    """

    tflops: dict[str, float]
    bandwidth: float
    matmul: float
    attention: tuple[float, float]
    attention_keys: tuple[int, int] = (400, 800)
    memory: float = 0.80
    kernel_seconds: float = 2e-6
    launch_seconds: tuple[float, float] = (9e-6, 5e-6)


# Fractions of the dense peak. Ceilings of matrix products as measured (stas00/ml-engineering, MAMF): A100 0.87,
# H100 and H200 0.80, B200 0.78; shapes of a transformer reach about nine tenths of these. Attention: FlashAttention-2
# as published (arXiv 2307.08691), causal, with heads of 64 to 128 channels, on the longest sequences. Shorter ones are
# slower: without a mask, 512 keys reach 0.81 of the longest's rate forward and 0.64 backward (an H100, thread 2688 of
# Dao-AILab/flash-attention). A causal query sees half of its keys, and blocks of 128 on the diagonal are computed
# whole, so 1,024 causal keys reach 0.72 and 0.57: what `attention_keys` says.
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
        full_name: As torch reports it.
        tflops: Dense peak by kind of arithmetic.
        bandwidth: Of its memory, bytes per second.
    """
    matmul, attention = next((row for name, row in _FRACTIONS.items() if name in full_name), _OTHER)
    return Rates(tflops=tflops, bandwidth=bandwidth, matmul=matmul, attention=attention)


@dataclass
class Seconds:
    """Time breakdown of part of a step.

    Attributes:
        matmul: Matrix products.
        attention: Fused attention.
        memory: Everything limited by memory traffic.
        waiting: The device waits for the host to start kernels.
        num_launches: Kernels; of the mean of several blocks no whole number.
    """

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    waiting: float = 0.0
    num_launches: float = 0

    @property
    def total(self) -> float:
        """Total time."""
        return self.matmul + self.attention + self.memory + self.waiting

    def add(self, other: "Seconds", *, times: float = 1.0) -> None:
        """Add another part of a step, several times or a fraction of it."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + times * getattr(other, part.name))


@dataclass
class StepSeconds:
    """The parts of a step, by section."""

    sections: dict[str, Seconds] = field(default_factory=dict)

    def of(self, start: str) -> Seconds:
        """Return the sum over all sections that start with a prefix."""
        total = Seconds()
        for name, part in self.sections.items():
            if name.startswith(start):
                total.add(part)
        return total


def time_step(ops: Sequence[Op], rates: Rates, *, is_compiled: bool) -> StepSeconds:
    """Return the seconds of each section, without communication.

    Args:
        ops: Of one step.
        rates: Of the device.
        is_compiled: Whether the blocks and the loss are: elementwise operators between two others are one kernel.
    """
    step = StepSeconds()
    fused: list[Op] = []
    for op in ops:
        if op.cost.kind == "transfer":  # runs beside the computation
            continue
        place = op.section.partition("/")[2]
        fuses = is_compiled and (place not in ("", "embedding"))
        part = step.sections.setdefault(op.section, Seconds())
        if fused and (fused[0].section != op.section or not _is_fusible(op)):
            _add_fused(step.sections[fused[0].section], fused, rates)
            fused = []
        if fuses and _is_fusible(op):
            fused.append(op)
        else:
            _add(part, op, rates)
    if fused:
        _add_fused(step.sections[fused[0].section], fused, rates)
    for name, part in step.sections.items():
        launch = rates.launch_seconds[is_compiled and "/" in name]
        part.waiting = max(part.num_launches * launch - part.total, 0.0)
    return step


def _is_fusible(op: Op) -> bool:
    name = op.name.partition("::")[2]
    return op.cost.kind == "memory" and not any(word in name for word in _FUSES_NOT)


def _add(part: Seconds, op: Op, rates: Rates) -> None:
    cost = op.cost
    if cost.num_launches == 0 or cost.kind == "collective":
        return
    part.num_launches += cost.num_launches
    traffic = cost.num_bytes / (rates.bandwidth * rates.memory) + rates.kernel_seconds
    peak = rates.tflops[kind_of(cost.dtype)] * 1e12
    if cost.kind == "matmul":
        part.matmul += max(cost.flops / (peak * rates.matmul), traffic)
    elif cost.kind == "attention":
        is_backward = "backward" in op.name
        fraction = rates.attention[is_backward] / (1 + rates.attention_keys[is_backward] / cost.num_keys)
        part.attention += max(cost.flops / (peak * fraction), traffic)
    else:
        part.memory += traffic


def _add_fused(part: Seconds, ops: Iterable[Op], rates: Rates) -> None:
    """Add a run of elementwise operators as one kernel: it reads what it did not make, and writes what is kept."""
    made: set[int] = set()
    traffic = 0.0
    for op in ops:
        traffic += sum(size for number, size in op.reads.items() if number not in made)
        made |= op.writes.keys() | op.reads.keys()
        traffic += sum(size for number, size in op.writes.items() if number not in op.temporary)
    part.num_launches += 1
    part.memory += traffic / (rates.bandwidth * rates.memory) + rates.kernel_seconds


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of arithmetic of a dtype, a key of `Rates.tflops`."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
