"""Decide from loss and gradient norm whether to skip an optimizer step, without device synchronization."""

import math
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..grad_norm.callback import global_norm
from ..ranks import mean_over_ranks


class StepGuard:
    """Skips a step whose loss or norm is NaN, inf or above a limit; all ranks see the same values and decide the same.

    Attributes:
        max_loss, max_norm: Limits below which loss and norm must be for the step to be applied; inf skips only NaN and
            inf.
        loss: Mean loss of the current step over all ranks, a 0-dim tensor.
        norm: Global gradient norm of the current step before clipping, a 0-dim tensor.
        skipped: Whether the newest step was skipped, a 0-dim bool tensor; None if there was no step.
    """

    def __init__(self) -> None:
        self.max_loss = math.inf
        self.max_norm = math.inf
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None
        self.skipped: Tensor | None = None

    def judge(self, norm: Tensor) -> Tensor:
        """Return whether to skip the step.

        Args:
            norm: Global gradient norm before clipping, a 0-dim tensor.

        Returns:
            A 0-dim bool tensor on the device of the norm.
        """
        # `<` also rejects NaN, and inf even if the limit is inf
        allowed = norm < self.max_norm
        if self.loss is not None:
            allowed = allowed & (self.loss.detach().to(norm.device) < self.max_loss)
        self.norm, self.skipped = norm.detach(), ~allowed
        return self.skipped

    def is_above_limit(self) -> bool:
        """Return whether loss or norm of the current step reaches a finite limit; synchronizes with the GPU."""
        pairs = ((self.loss, self.max_loss), (self.norm, self.max_norm))
        return any(value is not None and limit < math.inf and bool(value >= limit) for value, limit in pairs)


@runtime_checkable
class SupportsStepGuard(Protocol):
    """A module whose optimizer step queries a guard without synchronizing with the GPU."""

    def recipes_guard_steps(self, guard: StepGuard) -> None:
        """Let this guard decide before each optimizer step whether to skip it."""


class FallbackGuard:
    """Guards the steps of a module that is not a `SupportsStepGuard`; costs a norm and a GPU synchronization per step.

    To skip a step, it hides the gradients from the optimizer during the step, so that neither weights nor optimizer
    state change. Module hooks, clipping and code that runs after the step see the actual gradients.

    Only gradients can damage weights. A step whose loss or norm is NaN or inf is therefore still applied if every
    gradient is finite when the optimizer steps: the module or clipping may have replaced NaN, a NaN in the loss may not
    have a gradient, and squares of large gradients overflow before the gradients do.

    Args:
        guard: Decides which steps to skip.
        optimizers: Optimizers whose steps are guarded.
    """

    def __init__(self, guard: StepGuard, optimizers: Iterable[Optimizer]) -> None:
        self._guard = guard
        self._window_loss: Tensor | None = None
        self._skips = False  # whether to skip the current step
        self._depends_on_gradients = False  # skip only if a gradient is not finite
        self._num_evaluations = 0  # of the closure in the current step
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters with their gradients
        self._hooks = [
            hook
            for optimizer in optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._begin_step),
                optimizer.register_step_post_hook(self._end_step),
            )
        ]

    def remove(self) -> None:
        """Remove all hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def add_loss(self, trainer: Trainer, loss: Tensor) -> None:
        """Add the loss of one micro-batch, as passed to its backward pass; call it in `on_before_backward`."""
        if self._num_evaluations:  # a line search evaluates trial weights, whose loss may be arbitrary
            return
        scaler = get_scaler(trainer)
        unscaled = loss.detach().reshape(()) if scaler is None else loss.detach().reshape(()) / scaler._scale
        self._window_loss = unscaled if self._window_loss is None else self._window_loss + unscaled

    def guard_step(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Decide whether to skip the current step; call it in `on_before_optimizer_step`."""
        if self._num_evaluations:
            return
        loss, self._window_loss = self._window_loss, None
        self._skips = False
        if loss is None:  # training_step returned None for this batch
            self._guard.loss = self._guard.skipped = None
            return
        self._guard.loss = mean_over_ranks(loss)
        norm = global_norm(optimizer)
        if norm is None:
            self._guard.skipped = None
            return
        scaler = get_scaler(trainer)
        # a fused optimizer unscales in its kernel, after the scaler has checked for inf
        is_scaled = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
        self._skips = bool(self._guard.judge(norm / scaler._scale if is_scaled else norm))
        self._depends_on_gradients = self._skips and not self._guard.is_above_limit()
        if scaler is not None and self._skips and bool(norm.isfinite().logical_not() & loss.isfinite()):
            # an overflow: the scaler skips the step, and running statistics stem from a finite forward pass
            self._guard.skipped, self._skips = torch.zeros_like(norm, dtype=torch.bool), False

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hide the gradients once the closure has computed them, or now if there is none, as under a loss scaler."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._hide_gradients(optimizer)
            return None

        def compute() -> Any:
            loss = closure()
            if self._num_evaluations == 0:
                self._hide_gradients(optimizer)
            self._num_evaluations += 1
            return loss

        return args[:1], kwargs | {"closure": compute}

    def _hide_gradients(self, optimizer: Optimizer) -> None:
        if self._skips and self._depends_on_gradients:
            largest = global_norm(optimizer, norm_type=math.inf)
            assert largest is not None, "a norm was computed before"
            self._skips = not bool(largest.isfinite())
            self._guard.skipped = torch.full_like(largest, self._skips, dtype=torch.bool)
        if not self._skips:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        self._num_evaluations = 0


def has_step_hooks(optimizer: object) -> bool:
    """Return whether an optimizer's steps can be guarded: it must have run torch's `Optimizer.__init__`."""
    return isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks")


def get_scaler(trainer: Trainer) -> Any:
    """Return the float16 loss scaler; None if there is none or it is disabled."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None
