"""Skip or clip a step inside a ZeRO optimizer, where the gradient norm is first known: one comparison per step.

To DeepSpeed, a skipped step looks like an overflow that leaves the loss scale unchanged.
"""

from typing import Any

import torch
from torch import Tensor

from recipes.clipping import Clipping
from recipes.strategy import StepGuard


class StepGuardMixin:
    """Implements the attributes of `recipes.strategy.Engine` for steps inside a ZeRO optimizer.

    DeepSpeed 0.19.8 keeps the norm in a local variable of its step; the only call between that point and the update is
    `_update_scale`. This class therefore records the norm where it is computed and decides in `_update_scale`.

    Attributes:
        guard: Decides which steps to skip; None skips none.
        clipping: Adaptive norm limit in addition to the fixed one; None disables it.
        clip_threshold: Norm limit of the last step, 0-dim; inf without a limit, None before the first step.
    """

    deepspeed_engine: Any
    guard: StepGuard | None = None
    clipping: Clipping | None = None
    clip_threshold: Tensor | None = None

    def hook_into(self, optimizer: Any) -> None:
        """Insert this guard between the norm and the update of DeepSpeed's optimizer."""
        self._hooked = optimizer
        self._fixed_limit = optimizer.clip_grad or torch.inf  # DeepSpeed uses 0 for no limit
        # steps skipped for reasons other than an overflow; DeepSpeed counts both together
        self._num_skipped = 0
        self._skipped_norm: Tensor | None = None  # norm of the last step if the guard skipped it, 0-dim
        self._scaled_norm: Tensor | None = None
        self._update_scale = optimizer._update_scale
        optimizer._update_scale = self._decide
        if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
            self._compute_norm = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = self._note_norm
        else:
            self._compute_norm = optimizer._get_norm_groups
            optimizer._get_norm_groups = self._note_norm_groups

    def _note_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = self._compute_norm(*args, **kwargs)
        self._scaled_norm = torch.as_tensor(norm, dtype=torch.float32)  # 0-dim, times the loss scale
        return norm

    def _note_norm_groups(self) -> Any:
        groups = self._compute_norm()
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in groups])  # [groups]
        # DeepSpeed reports -1 for a group whose norm is not finite; squared, it would look like 1
        norms = torch.where(norms >= 0, norms, torch.inf)
        self._scaled_norm = torch.linalg.vector_norm(norms)  # 0-dim
        return groups

    def _decide(self, has_overflow: bool = False) -> None:
        """Replace `_update_scale`: update the scale, then clip or skip.

        Args:
            has_overflow: Whether DeepSpeed itself skips the step.
        """
        scaled, self._scaled_norm, self._skipped_norm = self._scaled_norm, None, None
        # read before the update below, which may change it: these gradients have the old scale
        scale = self._hooked.loss_scale
        self._update_scale(has_overflow)
        # an overflow detected before the norm leaves no norm; one detected in the norm makes it NaN or inf
        norm = torch.tensor(torch.inf) if has_overflow or scaled is None else scaled / scale  # 0-dim
        self._clip(norm)
        if self.guard is None:
            return
        if has_overflow or scaled is None:
            self.guard.judge(norm)  # called every step, so that its statistics include this one
            # without a dynamic loss scaler, an overflow is a spike
            self._num_skipped += not self._hooked.dynamic_loss_scale
            return
        if bool(self.guard.judge(norm)):
            self._hooked.overflow = True  # checked after `_update_scale`: DeepSpeed then returns without an update
            self._num_skipped += 1
            self._skipped_norm = norm

    def _clip(self, norm: Tensor) -> None:
        self.clip_threshold = torch.full_like(norm, self._fixed_limit)  # 0-dim
        if self.clipping is not None:
            self.clip_threshold = torch.minimum(self.clip_threshold, self.clipping.limit(norm))
            limit = float(self.clip_threshold)
            self._hooked.clip_grad = limit if limit < torch.inf else 0.0

    @property
    def grad_norm(self) -> Tensor | None:
        """Global norm before clipping in the last optimizer step, 0-dim; None before the first step."""
        if self._skipped_norm is not None:
            return self._skipped_norm
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm, dtype=torch.float32)

    @property
    def num_overflows(self) -> int:
        """Number of optimizer steps skipped because a scaled gradient was not finite."""
        return int(self.deepspeed_engine.skipped_steps) - self._num_skipped
