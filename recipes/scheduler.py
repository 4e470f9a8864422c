"""Learning-rate schedules as pure functions: optimizer step (0 = the first) -> multiplier of the peak."""

import math
from collections.abc import Sequence
from typing import Annotated


def _warmup(step: int, warmup_steps: int) -> float:
    """1/warmup at the first step, 1 at the last step of the warm-up: no step is wasted on a rate of 0."""
    return (step + 1) / warmup_steps if step < warmup_steps else 1.0


def _progress(step: int, begin: int, end: int) -> float:
    """0 at `begin`, 1 at the last step before `end` and after it."""
    return min(max((step - begin + 1) / (end - begin), 0.0), 1.0) if end > begin else 1.0


def _between(start: float, stop: float, share: float) -> float:
    return start + (stop - start) * share


def _cosine(share: float) -> float:
    """0 at 0, 1 at 1, along half a cosine."""
    return 0.5 * (1.0 - math.cos(math.pi * share))


def warmup_cosine(
    step: int,
    *,
    num_steps: int,
    warmup_steps: Annotated[int, ">= 0"],
    final_fraction: Annotated[float, ">= 0, <= 1"],
) -> float:
    """Linear up to 1, half a cosine down to `final_fraction` at the last step (SGDR, arXiv 1608.03983)."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps)
    return _between(1.0, final_fraction, _cosine(_progress(step, warmup_steps, num_steps)))


def warmup_stable_decay(
    step: int,
    *,
    num_steps: int,
    warmup_steps: Annotated[int, ">= 0"],
    decay_steps: Annotated[int, ">= 0"],
    final_fraction: Annotated[float, ">= 0, <= 1"],
) -> float:
    """Linear up, a plateau at 1, linear down over the last `decay_steps` (MiniCPM, arXiv 2404.06395)."""
    decay_begins = num_steps - decay_steps
    if step < decay_begins:
        return _warmup(step, warmup_steps)
    return _between(1.0, final_fraction, _progress(step, decay_begins, num_steps))


def linear(
    step: int,
    *,
    num_steps: int,
    warmup_steps: Annotated[int, ">= 0"],
    final_fraction: Annotated[float, ">= 0, <= 1"],
) -> float:
    """Linear up to 1, then linear down to `final_fraction` at the last step."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps)
    return _between(1.0, final_fraction, _progress(step, warmup_steps, num_steps))


def constant(step: int, *, warmup_steps: Annotated[int, ">= 0"]) -> float:
    """Linear up to 1, then 1."""
    return _warmup(step, warmup_steps)


def constant_cooldown(
    step: int,
    *,
    num_steps: int,
    warmup_steps: Annotated[int, ">= 0"],
    cooldown_steps: Annotated[int, ">= 0"],
    final_fraction: Annotated[float, ">= 0, <= 1"],
) -> float:
    """1, then down over the last `cooldown_steps` as 1 - sqrt(share) (arXiv 2405.18392)."""
    cooldown_begins = num_steps - cooldown_steps
    if step < cooldown_begins:
        return _warmup(step, warmup_steps)
    return _between(1.0, final_fraction, math.sqrt(_progress(step, cooldown_begins, num_steps)))


def step(
    step: int, *, milestones: Sequence[int], factor: float, warmup_steps: Annotated[int, ">= 0"]
) -> float:
    """`factor` to the power of the milestones already passed (ResNet, arXiv 1512.03385)."""
    return _warmup(step, warmup_steps) * factor ** sum(
        step >= milestone for milestone in milestones
    )


def one_cycle(
    step: int,
    *,
    num_steps: int,
    warmup_fraction: Annotated[float, ">= 0, <= 1"],
    start_fraction: Annotated[float, ">= 0, <= 1"],
    final_fraction: Annotated[float, ">= 0, <= 1"],
) -> float:
    """A cosine up from `start_fraction` to 1, a cosine down to `final_fraction` (arXiv 1708.07120)."""
    warmup_steps = round(num_steps * warmup_fraction)
    if step < warmup_steps:
        return _between(start_fraction, 1.0, _cosine(_progress(step, 0, warmup_steps)))
    return _between(1.0, final_fraction, _cosine(_progress(step, warmup_steps, num_steps)))
