"""Decide before an optimizer step, from its loss and gradient norm, whether to skip it. No synchronization."""

import math
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..grad_norm.callback import global_norm
from ..ranks import mean_over_ranks


class StepGuard:
    """Skips a step whose loss or norm is NaN, inf or above a limit. Every rank sees the same values and decides alike.

    Attributes:
        max_loss, max_norm: A step is applied where its loss and its norm are below; inf: where they are finite.
        loss: Loss of the current step over all ranks, a 0-dim tensor.
        norm: Its global norm before clipping, a 0-dim tensor.
        skipped: Whether the newest step was skipped, a 0-dim bool tensor; None if there was none.
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
            norm: Global, before clipping, a 0-dim tensor.

        Returns:
            A 0-dim bool tensor on the device of the norm.
        """
        # `<` also rejects NaN, which is below nothing, and inf, which is not below itself
        allowed = norm < self.max_norm
        if self.loss is not None:
            allowed = allowed & (self.loss.detach().to(norm.device) < self.max_loss)
        self.norm, self.skipped = norm.detach(), ~allowed
        return self.skipped

    def is_above_limit(self) -> bool:
        """Return whether the loss or the norm of the current step is above a limit that was set. Waits for a GPU."""
        pairs = ((self.loss, self.max_loss), (self.norm, self.max_norm))
        return any(value is not None and limit < math.inf and bool(value >= limit) for value, limit in pairs)


@runtime_checkable
class SupportsStepGuard(Protocol):
    """A module whose optimizer step asks a guard, without a wait for a GPU."""

    def recipes_guard_steps(self, guard: StepGuard) -> None:
        """Let this guard decide before each optimizer step whether the step is skipped."""


class FallbackGuard:
    """Guards the steps of a module that takes no guard: costs a norm per step, and one wait for a GPU.

    A skipped step hides the gradients from the optimizer while it steps, so that neither weights nor optimizer state
    change. Hooks of the module, clipping and whatever runs after the step see the gradients as they are.

    Only gradients can damage weights. So a step whose loss or norm is NaN or inf is applied after all if every gradient
    is finite when the optimizer begins: the module or the clipping may have replaced NaN, a NaN in the loss may have no
    gradient, and the squares of large gradients overflow before these do.

    Args:
        guard: Judges the steps.
        optimizers: Those that step.
    """

    def __init__(self, guard: StepGuard, optimizers: Iterable[Optimizer]) -> None:
        self._guard = guard
        self._window_loss: Tensor | None = None
        self._skips = False  # the step under way
        self._depends_on_gradients = False  # it is skipped only if one of them is not finite
        self._num_evaluations = 0  # of the closure, in the step under way
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
        """Leave the optimizers as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def add_loss(self, trainer: Trainer, loss: Tensor) -> None:
        """Add the loss of one micro-batch, as its backward pass takes it; call it in `on_before_backward`."""
        if self._num_evaluations:  # a line search tries other weights: those may be as bad as they like
            return
        scaler = _get_scaler(trainer)
        unscaled = loss.detach().reshape(()) if scaler is None else loss.detach().reshape(()) / scaler._scale
        self._window_loss = unscaled if self._window_loss is None else self._window_loss + unscaled

    def guard_step(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Decide whether the step under way is skipped; call it in `on_before_optimizer_step`."""
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
        scaler = _get_scaler(trainer)
        # a fused optimizer unscales inside its kernel, after the scaler has looked for infinities
        is_scaled = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
        self._skips = bool(self._guard.judge(norm / scaler._scale if is_scaled else norm))
        self._depends_on_gradients = self._skips and not self._guard.is_above_limit()
        if scaler is not None and self._skips and bool(norm.isfinite().logical_not() & loss.isfinite()):
            # an overflow: the scaler skips the step, and running statistics are those of a finite forward pass
            self._guard.skipped, self._skips = torch.zeros_like(norm, dtype=torch.bool), False

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hide the gradients once they are computed: by the closure, or before the step, as under a loss scaler."""
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
    """Return whether the steps of an optimizer can be guarded: it is one of torch's, and was constructed as one."""
    return isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks")


def _get_scaler(trainer: Trainer) -> Any:
    """Return the loss scaler of float16; None without one, or with one that is switched off."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def copy_buffers(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the buffers of a module with copies; without those that have no values yet, or share them (`expand`)."""
    present = (buffer for buffer in module.buffers() if not is_lazy(buffer))
    return [(buffer, buffer.clone()) for buffer in present if not _is_expanded(buffer)]


def _is_expanded(buffer: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))


@torch.no_grad()
def restore_buffers(copies: list[tuple[Tensor, Tensor]], skipped: Tensor | None) -> None:
    """Restore the buffers of a skipped step: its forward pass may have put a NaN into running statistics.

    Args:
        copies: Buffers with their copies from before the step.
        skipped: A 0-dim bool tensor, not read on the host where it is on a GPU; None if there was no step.
    """
    if skipped is None or not copies or (not skipped.is_cuda and not bool(skipped)):
        return
    for buffer, before in copies:
        buffer.copy_(torch.where(skipped.to(buffer.device), before, buffer))
