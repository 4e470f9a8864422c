"""Gradient norm before clipping: free where the engine keeps it, else one pass per logged step; also by block."""

import logging
import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..logged_step import StepCounter, is_logged_step, log_row
from .by_block import sum_by_block
from .trend import NormTrend

log = logging.getLogger("lightning_recipes")
_NO_LIMIT = 1e6  # logged for an infinite threshold: a curve cannot show infinity


class GradNormMonitor(Callback):
    """Logs `grad/norm` and `grad/clipped_fraction` at logged steps.

    Useful always: a norm that rises is the earliest sign of divergence, and a run that clips most of its steps
    trains with a smaller learning rate than the one set.

    A strategy or, failing that, a module that sets `grad_norm` (0-dim tensor, the global L2 norm before clipping of
    the last optimizer step) is read. Otherwise the norm of the optimizer's gradients is computed in
    `on_before_optimizer_step`, at logged steps only. FSDP1 and DeepSpeed do not expose their sharded gradients and
    then get no `grad/norm`: the norm of one rank's shard is not the global norm.

    `grad/clipped_fraction` is the fraction of the optimizer steps since the last row whose norm was above
    `trainer.gradient_clip_val`, counted on the device. It needs the norm of every step, so it is logged only where
    `grad_norm` is kept and clipping by norm is on. Where the threshold changes from step to step, the strategy or
    module sets `clip_threshold` too, logged as `grad/clip_threshold`.

    Warns once, at a logged step, when the norm vanishes or keeps rising; warns again only after it has recovered.

    Args:
        per_block: Also log `grad/norm/<block>`, before clipping: one pass and one sum over ranks per block. Not
            under FSDP1 or DeepSpeed, which do not expose their gradients.
        vanishing: Warn below this norm.
        rising: Warn when the median of recent norms exceeds the lowest median so far by this factor.

    Example:
        >>> monitor = GradNormMonitor(per_block=True)
        >>> trainer = Trainer(callbacks=[monitor], gradient_clip_val=1.0, accelerator="cpu", logger=False)
        >>> monitor.state_dict()["num_clipped"]
        0
    """

    def __init__(self, *, per_block: bool = False, vanishing: float = 1e-7, rising: float = 30.0) -> None:
        self._per_block = per_block
        self._trend = NormTrend(vanishing=vanishing, rising=rising)
        self._by_block: dict[str, float | None] = {}
        self._steps = StepCounter()
        self._num_steps = 0  # since the last row
        self._num_clipped: Tensor | int = 0  # of these; 0-dim, on the device of the norm
        self._computed_norm: Tensor | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not is_logged_step(trainer):
            return
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            return
        scale = _get_scale_left(trainer, optimizer)
        if self._per_block:
            named = pl_module.named_parameters()
            by_block = sum_by_block((name, parameter.grad) for name, parameter in named if parameter.grad is not None)
            self._by_block = {block: None if norm is None else norm / scale for block, norm in by_block.items()}
        if _find_norm_keeper(trainer, pl_module) is None:
            norm = global_norm(optimizer)
            self._computed_norm = None if norm is None else norm / scale

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.stepped(trainer):
            return
        keeper = _find_norm_keeper(trainer, pl_module)
        if keeper is None:
            norm, self._computed_norm = self._computed_norm, None
        else:
            norm = keeper.grad_norm.detach() if isinstance(keeper.grad_norm, Tensor) else None
        threshold = _get_threshold(trainer, keeper)
        if norm is not None and threshold is not None and keeper is not None:
            self._num_steps += 1
            self._num_clipped = self._num_clipped + (norm > threshold).long()
        if norm is not None and is_logged_step(trainer):
            row = {"grad/norm": norm, **self._take_clipped_fraction()}
            if isinstance(threshold, Tensor):
                row["grad/clip_threshold"] = threshold.clamp(max=_NO_LIMIT)
            for block, block_norm in self._by_block.items():
                row[f"grad/norm/{block}"] = math.nan if block_norm is None else block_norm
            log_row(pl_module, row)
            self._check_trend(trainer, norm)

    def _check_trend(self, trainer: Trainer, norm: Tensor) -> None:
        """Warn about the norm of a logged step: its row reads the same value from the device anyway."""
        warning = self._trend.observe(float(norm))
        if warning is not None and trainer.is_global_zero:
            log.warning(f"Step {trainer.global_step}: {warning}")

    def _take_clipped_fraction(self) -> dict[str, Tensor | float]:
        """Return the fraction since the last row, if steps were counted, and restart counting."""
        if self._num_steps == 0:
            return {}
        fraction = self._num_clipped / self._num_steps
        self._num_steps, self._num_clipped = 0, 0
        return {"grad/clipped_fraction": fraction}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self._num_steps,
            "num_clipped": int(self._num_clipped),
            "trend": self._trend.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_steps = state_dict["num_steps"]
        self._num_clipped = state_dict["num_clipped"]
        if "trend" in state_dict:  # not in the checkpoints of earlier versions
            self._trend.load_state_dict(state_dict["trend"])


def _get_scale_left(trainer: Trainer, optimizer: Optimizer) -> float:
    """Return the loss scale that the gradients still carry.

    Lightning unscales them before this hook, unless the optimizer does so in its own kernel: fused AdamW under
    `16-mixed`.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return 1.0
    return float(scaler.get_scale())


def _find_norm_keeper(trainer: Trainer, pl_module: LightningModule) -> Any:
    """Return the object whose `grad_norm` is to be read: the strategy, else the module; None if neither keeps it.

    A strategy counts once it has a value: it keeps none for a module that clips without it. A module counts from
    the start, when its value is still None; a method of that name is no value.
    """
    if isinstance(getattr(trainer.strategy, "grad_norm", None), Tensor):
        return trainer.strategy
    if hasattr(pl_module, "grad_norm") and not callable(pl_module.grad_norm):
        return pl_module
    return None


def _get_threshold(trainer: Trainer, keeper: Any) -> Tensor | float | None:
    """Return the norm above which the last step was clipped; None without clipping by norm.

    The keeper's own `clip_threshold` counts where an adaptive clipping changes it from step to step.
    """
    own = getattr(keeper, "clip_threshold", None)
    is_adaptive = getattr(trainer.strategy, "clipping", None) is not None
    return own if isinstance(own, Tensor) and is_adaptive else _get_max_norm(trainer)


def _get_max_norm(trainer: Trainer) -> float | None:
    max_norm = trainer.gradient_clip_val
    if not max_norm or str(trainer.gradient_clip_algorithm or "norm") != "norm":
        return None
    return float(max_norm)


def global_norm(optimizer: Optimizer) -> Tensor | None:
    """Return the L2 norm over every gradient the optimizer is about to use, 0-dim; None if there is none yet."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    norm = torch.nn.utils.get_total_norm(present)  # [], dtype of the gradients
    # Gradients sharded as DTensors: the norm is a partial sum on each rank until it is gathered.
    full_tensor = getattr(norm, "full_tensor", None)
    return norm if full_tensor is None else full_tensor()
