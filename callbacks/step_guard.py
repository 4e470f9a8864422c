"""Whether an optimizer step is made, decided before it is, from its loss and its gradient norm. No synchronisation."""

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from callbacks.grad_norm import global_norm


class StepGuard:
    """Refuses a step that is not finite or above a limit. Every rank sees the same numbers, so all decide the same.

    Attributes:
        largest_loss, largest_norm: A step is made where its loss and its norm are below; inf: where they are finite.
        loss: Of the step about to be made, over all ranks, a 0-dim tensor.
        norm: Its global norm before clipping, a 0-dim tensor.
        refused: Whether the newest step was, a 0-dim bool tensor; None: there was none.
    """

    def __init__(self) -> None:
        self.largest_loss = math.inf
        self.largest_norm = math.inf
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None
        self.refused: Tensor | None = None

    def judge(self, norm: Tensor) -> Tensor:
        """Whether a step is refused.

        Args:
            norm: Global, before clipping, a 0-dim tensor.

        Returns:
            A 0-dim bool tensor on the device of the norm.
        """
        # NaN is below nothing, and infinity not below itself
        allowed = norm < self.largest_norm
        if self.loss is not None:
            allowed = allowed & (self.loss.detach().to(norm.device) < self.largest_loss)
        self.norm, self.refused = norm.detach(), ~allowed
        return self.refused


class OwnGuard:
    """Guards the steps of a module that does not do it itself: a norm a step, and one wait for a GPU.

    Args:
        guard: Judges.
    """

    def __init__(self, guard: StepGuard) -> None:
        self._guard = guard
        self._window_loss: Tensor | None = None

    def add_loss(self, trainer: Trainer, loss: Tensor) -> None:
        """Call in `on_before_backward`, with the loss of one micro-batch as the backward pass takes it."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        share = loss.detach() if scaler is None else loss.detach() / scaler._scale
        self._window_loss = share if self._window_loss is None else self._window_loss + share

    def guard_step(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Call in `on_before_optimizer_step`: a step that is refused loses its gradients."""
        loss, self._window_loss = self._window_loss, None
        assert loss is not None, "a step without a backward pass"
        self._guard.loss = _mean_over_ranks(loss)
        norm = global_norm(optimizer)
        if norm is not None and bool(self._guard.judge(norm)):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


def guards_itself(pl_module: LightningModule) -> bool:
    """Whether a module takes a guard: `guard_steps(guard)`."""
    own: Any = getattr(pl_module, "guard_steps", None)
    return callable(own)


def _mean_over_ranks(value: Tensor) -> Tensor:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    mean = value.clone().float()
    dist.all_reduce(mean)
    return torch.div(mean, dist.get_world_size())
