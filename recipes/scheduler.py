"""Learning-rate schedules: optimizer step (0 = the first) -> multiplier of the peak learning rate.

Most are functions of the step alone. Schedulers of torch are classes that are called with the step, too: they follow a
scheduler of an optimizer that trains nothing, so that a run can be resumed and rolled back to any step under each.
"""

import logging
import math
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recipes.errors import ConfigError

LOGGER = logging.getLogger("lightning_recipes")


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


def _make_optimizer(lr: float) -> torch.optim.Optimizer:
    """Return an optimizer that trains nothing, whose rate a scheduler changes; one that has no momentum to change."""
    return torch.optim.Adagrad([torch.zeros(())], lr=lr)


class TorchSchedule:
    """A scheduler of torch, or one of yours that takes an optimizer, stepped once per optimizer step.

    Args:
        torch: Constructs it, given the optimizer.
        lr: Peak learning rate, to which rates that it is given, such as `eta_min`, are relative.
        num_steps: Optimizer steps of the run, for which it must have a rate; 0 or less: not known.
        warmup_steps: Optimizer steps of a linear warm-up, after which it begins; 0: none.

    Raises:
        ConfigError: It rejects its settings, follows a metric, changes more than the rate, or ends before the run.
    """

    is_schedule: ClassVar[bool] = True
    deferred: ClassVar[tuple[str, ...]] = ("torch",)

    def __init__(
        self,
        *,
        torch: Callable[..., Any],
        lr: Annotated[float, "> 0"],
        num_steps: Annotated[int, ">= -1"],
        warmup_steps: Annotated[int, ">= 0"],
    ) -> None:
        self._lr, self._warmup_steps = lr, warmup_steps
        self._optimizer = _make_optimizer(lr)
        self._scheduler = torch(optimizer=self._optimizer)
        name = type(self._scheduler).__name__
        if isinstance(self._scheduler, ReduceLROnPlateau):
            reason = "it follows a metric of validation, and this schedule the steps"
            raise ConfigError(f"scheduler.torch._target_=…{name}", reason, "scheduler=plateau scheduler.patience=10")
        if not isinstance(self._scheduler, LRScheduler):
            fix = "'scheduler.torch={_target_: torch.optim.lr_scheduler.StepLR, step_size: 100}'"
            raise ConfigError("scheduler.torch=…", f"{name} is no scheduler of torch, which has a rate per step", fix)
        self._rates = array("d", [self._read_rate()])  # of the steps so far
        try:
            self(max(num_steps - 1, 0))
        except (ArithmeticError, TypeError, ValueError) as error:  # most check no argument before they use it
            fix = f"other arguments of it, with a rate for each of {num_steps - warmup_steps} steps"
            raise ConfigError(f"scheduler.torch._target_=…{name}", str(error), fix) from error

    def __call__(self, step: int) -> float:
        """Return the multiplier of a step."""
        if step < self._warmup_steps:
            return _warmup(step, self._warmup_steps)
        while len(self._rates) <= step - self._warmup_steps:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self._scheduler.step()
            self._rates.append(self._read_rate())
        return self._rates[step - self._warmup_steps] / self._lr

    def _read_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


class Plateau:
    """Multiply the rate by `factor` when a metric of validation has stopped improving (torch's ReduceLROnPlateau).

    Its state is what the validations found, by step, so that a rollback goes back in it.

    Args:
        monitor: Metric of validation.
        mode: Whether the lowest or the highest value is best.
        factor: Multiplier of the rate each time.
        patience: Validations without an improvement that are tolerated; one more reduces the rate.
        threshold: Smallest difference that is an improvement.
        threshold_mode: Whether it is a fraction of the best value or absolute.
        cooldown: Validations after a reduction that do not count.
        min_lr: Smallest learning rate.
        lr: Peak learning rate, to which `min_lr` is relative.
        warmup_steps: Optimizer steps of the linear warm-up; 0: none.
    """

    is_schedule: ClassVar[bool] = True
    counts_validations: ClassVar[bool] = True

    def __init__(
        self,
        *,
        monitor: str,
        mode: Literal["min", "max"],
        factor: Annotated[float, "> 0, < 1"],
        patience: Annotated[int, ">= 0"],
        threshold: Annotated[float, ">= 0"],
        threshold_mode: Literal["rel", "abs"],
        cooldown: Annotated[int, ">= 0"],
        min_lr: Annotated[float, ">= 0"],
        lr: Annotated[float, "> 0"],
        warmup_steps: Annotated[int, ">= 0"],
    ) -> None:
        self.monitor = monitor
        self._settings: dict[str, Any] = {
            "mode": mode,
            "factor": factor,
            "patience": patience,
            "threshold": threshold,
            "threshold_mode": threshold_mode,
            "cooldown": cooldown,
            "min_lr": min_lr,
        }
        self._lr, self._warmup_steps = lr, warmup_steps
        self._found: dict[int, float] = {}  # step of a validation -> value
        self._factor = 1.0

    def __call__(self, step: int) -> float:
        """Return the multiplier of a step, after the validations so far."""
        return _warmup(step, self._warmup_steps) * self._factor

    def add(self, step: int, value: float) -> bool:
        """Add the value of a validation after a number of optimizer steps; return whether the rate changes."""
        before = self._factor
        self._found[step] = value
        self._compute()
        return self._factor != before

    def rewind(self, step: int) -> None:
        """Forget the validations after a step."""
        self._found = {each: value for each, value in self._found.items() if each <= step}
        self._compute()

    def _compute(self) -> None:
        optimizer = _make_optimizer(self._lr)
        scheduler = ReduceLROnPlateau(optimizer, **self._settings)
        for value in self._found.values():
            scheduler.step(value)
        self._factor = float(optimizer.param_groups[0]["lr"]) / self._lr

    def state_dict(self) -> dict[str, Any]:
        """Return the step of each validation and what it found."""
        return {"steps": [*self._found], "values": [*self._found.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._found = dict(zip(state["steps"], state["values"], strict=True))
        self._compute()
