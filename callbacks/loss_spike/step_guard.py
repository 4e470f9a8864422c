"""Whether an optimizer step is made, decided before it is, from its loss and its gradient norm. No synchronisation."""

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..grad_norm.callback import global_norm


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
        if loss is None:  # the module has passed over this batch
            self._guard.loss = self._guard.refused = None
            return
        self._guard.loss = _mean_over_ranks(loss)
        norm = global_norm(optimizer)
        scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        # a fused optimizer unscales inside its kernel, after the scaler has looked for infinities
        still_scaled = scaler is not None and getattr(
            optimizer, "_step_supports_amp_scaling", False
        )
        if norm is not None and bool(
            self._guard.judge(norm / scaler._scale if still_scaled else norm)
        ):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not still_scaled:
                        parameter.grad = None
                    elif parameter.grad is not None:
                        parameter.grad.fill_(
                            torch.inf
                        )  # the scaler skips it, and takes it for an overflow


def guards_itself(pl_module: LightningModule) -> bool:
    """Whether a module takes a guard: `guard_steps(guard)`."""
    own: Any = getattr(pl_module, "guard_steps", None)
    return callable(own)


@torch.no_grad()
def keep_buffers(kept: list[tuple[Tensor, Tensor]], refused: Tensor | None) -> None:
    """Give buffers back what they held before a step that was refused: running statistics that saw a NaN keep it.

    Args:
        kept: Buffers with their copies.
        refused: A 0-dim bool tensor; None: there was no step. Not read on the host where it lies on a GPU.
    """
    if refused is None or not kept or (not refused.is_cuda and not bool(refused)):
        return
    for buffer, before in kept:
        buffer.copy_(torch.where(refused.to(buffer.device), before, buffer))


def _mean_over_ranks(value: Tensor) -> Tensor:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    mean = value.clone().float()
    dist.all_reduce(mean)
    return torch.div(mean, dist.get_world_size())
