"""Skips or clips a step inside a ZeRO optimizer, where its gradient norm is first known: one comparison a step.

A skipped step looks to DeepSpeed like an overflow that leaves the loss scale unchanged.
"""

from typing import Any

import torch
from torch import Tensor

from recipes.clipping import Clipping
from recipes.strategy import StepGuard


class ZeroStepGuard:
    """Hooks into a DeepSpeed optimizer between the norm and the update.

    DeepSpeed 0.19.8 keeps the norm in a local variable of its step; the only call from there to the update is
    `_update_scale`. So this notes the norm where it is computed and decides where `_update_scale` is called.

    Args:
        optimizer: DeepSpeed's.

    Attributes:
        guard: Decides which steps to skip; None executes every step.
        clipping: Adaptive limit of the norm in addition to the fixed one; None disables it.
        limit: Limit of the last step's norm, a 0-dim tensor; inf without a limit.
        num_skipped: Steps skipped for another reason than too large a loss scale; DeepSpeed counts both together.
        norm: Norm of the last step if the guard skipped it, a 0-dim tensor; None means the engine knows it.
    """

    def __init__(self, optimizer: Any) -> None:
        self.guard: StepGuard | None = None
        self.clipping: Clipping | None = None
        self.limit: Tensor | None = None
        self.num_skipped = 0
        self._fixed_limit = optimizer.clip_grad or torch.inf  # DeepSpeed's 0 means none
        self.norm: Tensor | None = None
        self._optimizer = optimizer
        self._scaled_norm: Tensor | None = None
        self._update_scale = optimizer._update_scale
        optimizer._update_scale = self._decide
        if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
            self._compute = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = self._note_norm
        else:
            self._compute = optimizer._get_norm_groups
            optimizer._get_norm_groups = self._note_norm_groups

    def _note_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = self._compute(*args, **kwargs)
        self._scaled_norm = torch.as_tensor(norm, dtype=torch.float32)  # 0-dim, times the loss scale
        return norm

    def _note_norm_groups(self) -> Any:
        groups = self._compute()
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in groups])  # [groups]
        # DeepSpeed reports -1 for a group whose norm is not finite; squared, it would pass for 1
        norms = torch.where(norms >= 0, norms, torch.inf)
        self._scaled_norm = torch.linalg.vector_norm(norms)  # 0-dim
        return groups

    def _decide(self, has_overflow: bool = False) -> None:
        """Stand in for `_update_scale`: update the scale, then clip or skip.

        Args:
            has_overflow: Whether DeepSpeed itself skips the step.
        """
        scaled, self._scaled_norm, self.norm = self._scaled_norm, None, None
        # before the update below, which may change it: these gradients carry the old scale
        scale = self._optimizer.loss_scale
        self._update_scale(has_overflow)
        # an overflow found before the norm leaves none; found in the norm, it is no finite one
        norm = torch.tensor(torch.inf) if has_overflow or scaled is None else scaled / scale  # 0-dim
        self._clip(norm)
        if self.guard is None:
            return
        if has_overflow or scaled is None:
            self.guard.judge(norm)  # every step, so that its statistics count this one
            # without a scaler that looks for its scale, an overflow is a spike
            self.num_skipped += not self._optimizer.dynamic_loss_scale
            return
        if bool(self.guard.judge(norm)):
            self._optimizer.overflow = True  # read after `_update_scale`: DeepSpeed now returns without an update
            self.num_skipped += 1
            self.norm = norm

    def _clip(self, norm: Tensor) -> None:
        self.limit = torch.full_like(norm, self._fixed_limit)  # 0-dim
        if self.clipping is not None:
            self.limit = torch.minimum(self.limit, self.clipping.limit(norm))
            limit = float(self.limit)
            self._optimizer.clip_grad = limit if limit < torch.inf else 0.0


class StepGuardMixin:
    """Gives a strategy the attributes of `recipes.strategy.Engine` that concern steps inside a ZeRO optimizer."""

    deepspeed_engine: Any
    _step_guard: ZeroStepGuard

    @property
    def guard(self) -> StepGuard | None:
        """Decides which steps the engine skips; None executes every step."""
        return self._step_guard.guard

    @guard.setter
    def guard(self, guard: StepGuard | None) -> None:
        self._step_guard.guard = guard

    @property
    def clipping(self) -> Clipping | None:
        """Adaptive limit of the norm in addition to the fixed one; None disables it."""
        return self._step_guard.clipping

    @clipping.setter
    def clipping(self, clipping: Clipping | None) -> None:
        self._step_guard.clipping = clipping

    @property
    def clip_threshold(self) -> Tensor | None:
        """Norm to which the gradients of the last step were limited, a 0-dim tensor; None before the first."""
        return self._step_guard.limit

    @property
    def grad_norm(self) -> Tensor | None:
        """Global norm before clipping of the last optimizer step, a 0-dim tensor; None before the first."""
        if self._step_guard.norm is not None:
            return self._step_guard.norm
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm, dtype=torch.float32)

    @property
    def num_overflows(self) -> int:
        """Optimizer steps skipped because a gradient was not finite under a loss scale."""
        return int(self.deepspeed_engine.skipped_steps) - self._step_guard.num_skipped
