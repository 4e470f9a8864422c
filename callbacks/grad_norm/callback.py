"""Gradient norm before clipping: free where the module keeps it, else one pass per logged step; also by block."""

import logging
import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from ..logged_step import StepCounter, is_logged_step, log_row
from .by_block import sum_by_block
from .trend import NormTrend

log = logging.getLogger("lightning_recipes")
_NO_LIMIT = 1e6  # in a row: a curve cannot show infinity


class GradNormMonitor(Callback):
    """Logs `grad/norm` and `grad/clipped_fraction` at logged steps.

    A module that sets `grad_norm` (0-dim tensor, the global L2 norm before clipping of the last
    optimizer step) is read. For any other module the norm of the optimizer's gradients is computed
    in `on_before_optimizer_step`, at logged steps only; engines that keep their gradients sharded
    out of sight (FSDP1, DeepSpeed) then get no `grad/norm`: a rank's own share is not the norm.

    `grad/clipped_fraction` is the share of the optimizer steps since the last row whose norm was
    above `trainer.gradient_clip_val`. It needs the norm of every step, so it is logged only for
    modules that set `grad_norm`, and only where clipping by norm is on. Counted on the device. A module whose limit
    is another at every step sets `clip_threshold` too, logged as `grad/clip_threshold`.

    A norm that vanishes, or that has risen for long, is told once, at a logged step, until it is well again.

    Args:
        per_block: Whether `grad/norm/<block>` is logged too, before clipping, with a pass and a sum over ranks a
            block. Not under DeepSpeed, which keeps its gradients to itself.
        vanishing: A norm below it, and
        rising: the median of the last norms above the lowest it has been by this factor, are told.
    """

    def __init__(
        self, *, per_block: bool = False, vanishing: float = 1e-7, rising: float = 30.0
    ) -> None:
        self._per_block = per_block
        self._trend = NormTrend(vanishing=vanishing, rising=rising)
        self._by_block: dict[str, float | None] = {}
        self._steps = StepCounter()
        self._num_steps = 0
        self._num_clipped: Tensor | int = 0  # 0-dim, on the device of the norm
        self._computed_norm: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if not is_logged_step(trainer):
            return
        if self._per_block and not isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            named = pl_module.named_parameters()
            self._by_block = sum_by_block(
                (name, one.grad) for name, one in named if one.grad is not None
            )
        if _module_keeps_norm(pl_module):
            return
        if not isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            self._computed_norm = global_norm(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.stepped(trainer):
            return
        norm = self._norm_of_this_step(pl_module)
        max_norm = _limit(trainer, pl_module)
        if norm is not None and max_norm is not None and _module_keeps_norm(pl_module):
            self._num_steps += 1
            self._num_clipped = self._num_clipped + (norm > max_norm).long()
        if norm is not None and is_logged_step(trainer):
            row = {"grad/norm": norm, **self._take_clipped_fraction()}
            if isinstance(max_norm, Tensor):
                row["grad/clip_threshold"] = max_norm.clamp(max=_NO_LIMIT)
            blocks = self._by_block.items()
            row |= {f"grad/norm/{block}": math.nan if one is None else one for block, one in blocks}
            log_row(pl_module, row)
            self._watch(trainer, norm)

    def _watch(self, trainer: Trainer, norm: Tensor) -> None:
        """The row has been read from the device with the norm in it."""
        told = self._trend.observe(float(norm))
        if told is not None and trainer.is_global_zero:
            log.warning(f"Step {trainer.global_step}: {told}")

    def _norm_of_this_step(self, pl_module: LightningModule) -> Tensor | None:
        if _module_keeps_norm(pl_module):
            kept = pl_module.grad_norm
            return kept.detach() if isinstance(kept, Tensor) else None
        computed, self._computed_norm = self._computed_norm, None
        return computed

    def _take_clipped_fraction(self) -> dict[str, Tensor | float]:
        """The fraction since the last row, if steps were counted; counting starts again."""
        if self._num_steps == 0:
            return {}
        fraction = self._num_clipped / self._num_steps
        self._num_steps, self._num_clipped = 0, 0
        return {"grad/clipped_fraction": fraction}

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self._num_steps,
            "num_clipped": int(self._num_clipped),
            "trend": self._trend.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_steps = state_dict["num_steps"]
        self._num_clipped = state_dict["num_clipped"]
        if "trend" in state_dict:  # not in the checkpoints of earlier versions
            self._trend.load_state_dict(state_dict["trend"])


def _module_keeps_norm(pl_module: LightningModule) -> bool:
    """Has the module a `grad_norm` value (None before the first step), and not a method?"""
    return hasattr(pl_module, "grad_norm") and not callable(pl_module.grad_norm)


def _limit(trainer: Trainer, pl_module: LightningModule) -> Tensor | float | None:
    """The norm that a step was limited to: by the module's own word, where it differs from step to step."""
    own = getattr(pl_module, "clip_threshold", None)
    adapts = getattr(trainer.strategy, "clipping", None) is not None
    return own if isinstance(own, Tensor) and adapts else _max_norm(trainer)


def _max_norm(trainer: Trainer) -> float | None:
    """The norm above which gradients are scaled down; None where they are not clipped by norm."""
    limit = trainer.gradient_clip_val
    if not limit or str(trainer.gradient_clip_algorithm or "norm") != "norm":
        return None
    return float(limit)


def global_norm(optimizer: Optimizer) -> Tensor | None:
    """L2 norm over every gradient the optimizer is about to use; None if there is none yet."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    norm = torch.nn.utils.get_total_norm(present)  # [], dtype of the gradients
    # Gradients sharded as DTensors: the norm is a partial sum on each rank until it is gathered.
    full_tensor = getattr(norm, "full_tensor", None)
    return norm if full_tensor is None else full_tensor()
