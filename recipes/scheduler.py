"""Learning-rate schedules as pure functions: optimizer step (0 = the first) -> multiplier of the peak learning rate."""

import math
from collections.abc import Sequence
from typing import Annotated


def _warmup(step: int, warmup_steps: int) -> float:
    """Return 1/warmup at the first step and 1 at the last warm-up step: no step has a learning rate of 0."""
    return (step + 1) / warmup_steps if step < warmup_steps else 1.0


def _progress(step: int, begin: int, end: int) -> float:
    """Return 0 before `begin` and 1 from the last step before `end`, linear in between."""
    return min(max((step - begin + 1) / (end - begin), 0.0), 1.0) if end > begin else 1.0


def _interpolate(start: float, stop: float, fraction: float) -> float:
    return start + (stop - start) * fraction


def _cosine(fraction: float) -> float:
    """Map [0, 1] to [0, 1] along half a cosine."""
    return 0.5 * (1.0 - math.cos(math.pi * fraction))


def warmup_cosine(
    step: int,
    *,
    num_steps: Annotated[int, ">= 1"],
    warmup_steps: Annotated[int, ">= 0"],
    min_lr_factor: Annotated[float, ">= 0, <= 1"],
) -> float:
    """Warm up linearly, then decay along half a cosine to `min_lr_factor` (SGDR, arXiv 1608.03983).

    Args:
        step: Optimizer step, from 0.
        num_steps: Optimizer steps of the run.
        warmup_steps: Optimizer steps of the linear warm-up; 0: none.
        min_lr_factor: Learning rate of the last step, as a fraction of the peak.
    """
    if step < warmup_steps:
        return _warmup(step, warmup_steps)
    return _interpolate(1.0, min_lr_factor, _cosine(_progress(step, warmup_steps, num_steps)))


def wsd(
    step: int,
    *,
    num_steps: Annotated[int, ">= 1"],
    warmup_steps: Annotated[int, ">= 0"],
    decay_steps: Annotated[int, ">= 0"],
    min_lr_factor: Annotated[float, ">= 0, <= 1"],
) -> float:
    """Warm up linearly, stay at 1, then decay linearly over the last `decay_steps` (MiniCPM, arXiv 2404.06395).

    Args:
        step: Optimizer step, from 0.
        num_steps: Optimizer steps of the run.
        warmup_steps: Optimizer steps of the linear warm-up; 0: none.
        decay_steps: Optimizer steps of the decay at the end of the run.
        min_lr_factor: Learning rate of the last step, as a fraction of the peak.
    """
    decay_begins = num_steps - decay_steps
    if step < decay_begins:
        return _warmup(step, warmup_steps)
    return _interpolate(1.0, min_lr_factor, _progress(step, decay_begins, num_steps))


def linear(
    step: int,
    *,
    num_steps: Annotated[int, ">= 1"],
    warmup_steps: Annotated[int, ">= 0"],
    min_lr_factor: Annotated[float, ">= 0, <= 1"],
) -> float:
    """Warm up linearly, then decay linearly to `min_lr_factor` at the last step.

    Args:
        step: Optimizer step, from 0.
        num_steps: Optimizer steps of the run.
        warmup_steps: Optimizer steps of the linear warm-up; 0: none.
        min_lr_factor: Learning rate of the last step, as a fraction of the peak.
    """
    if step < warmup_steps:
        return _warmup(step, warmup_steps)
    return _interpolate(1.0, min_lr_factor, _progress(step, warmup_steps, num_steps))


def constant(step: int, *, warmup_steps: Annotated[int, ">= 0"]) -> float:
    """Warm up linearly, then stay at 1.

    Args:
        step: Optimizer step, from 0.
        warmup_steps: Optimizer steps of the linear warm-up; 0: none.
    """
    return _warmup(step, warmup_steps)


def constant_cooldown(
    step: int,
    *,
    num_steps: Annotated[int, ">= 1"],
    warmup_steps: Annotated[int, ">= 0"],
    cooldown_steps: Annotated[int, ">= 0"],
    min_lr_factor: Annotated[float, ">= 0, <= 1"],
) -> float:
    """Warm up linearly, stay at 1, then decay as 1 - sqrt(progress) (arXiv 2405.18392).

    Args:
        step: Optimizer step, from 0.
        num_steps: Optimizer steps of the run.
        warmup_steps: Optimizer steps of the linear warm-up; 0: none.
        cooldown_steps: Optimizer steps of the decay at the end of the run.
        min_lr_factor: Learning rate of the last step, as a fraction of the peak.
    """
    cooldown_begins = num_steps - cooldown_steps
    if step < cooldown_begins:
        return _warmup(step, warmup_steps)
    return _interpolate(1.0, min_lr_factor, math.sqrt(_progress(step, cooldown_begins, num_steps)))


def step(
    step: int,
    *,
    milestones: Sequence[Annotated[int, ">= 1"]],
    gamma: Annotated[float, "> 0"],
    warmup_steps: Annotated[int, ">= 0"],
) -> float:
    """Multiply by `gamma` at every milestone (ResNet, arXiv 1512.03385).

    Args:
        step: Optimizer step, from 0.
        milestones: Optimizer steps at which the learning rate drops, in any order.
        gamma: Multiplier at each milestone.
        warmup_steps: Optimizer steps of the linear warm-up; 0: none.
    """
    return _warmup(step, warmup_steps) * gamma ** sum(step >= milestone for milestone in milestones)


def one_cycle(
    step: int,
    *,
    num_steps: Annotated[int, ">= 1"],
    pct_start: Annotated[float, ">= 0, <= 1"],
    start_fraction: Annotated[float, ">= 0, <= 1"],
    min_lr_factor: Annotated[float, ">= 0, <= 1"],
) -> float:
    """Rise along a cosine from `start_fraction` to 1, then fall along a cosine (arXiv 1708.07120).

    Args:
        step: Optimizer step, from 0.
        num_steps: Optimizer steps of the run.
        pct_start: Fraction of the steps over which the learning rate rises.
        start_fraction: Learning rate of the first step, as a fraction of the peak.
        min_lr_factor: Learning rate of the last step, as a fraction of the peak.
    """
    warmup_steps = round(num_steps * pct_start)
    if step < warmup_steps:
        return _interpolate(start_fraction, 1.0, _cosine(_progress(step, 0, warmup_steps)))
    return _interpolate(1.0, min_lr_factor, _cosine(_progress(step, warmup_steps, num_steps)))
