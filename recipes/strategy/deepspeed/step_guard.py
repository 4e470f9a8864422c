"""Refuses or clips a step inside a ZeRO optimizer, where its gradient norm is first known. A comparison a step.

A step that is refused is an overflow that leaves the loss scale alone.
"""

from typing import Any

import torch
from torch import Tensor

from recipes.clipping import Clipping
from recipes.strategy import StepGuard


class ZeroStepGuard:
    """Goes into a DeepSpeed optimizer, between the norm and the update.

    DeepSpeed 0.19.8 computes the norm as a local of its step; from there to the update it calls `_update_scale`.

    Args:
        optimizer: DeepSpeed's.

    Attributes:
        guard: Judges; None: nothing is refused.
        clipping: A limit of the norm beside the fixed one; None: there is none.
        limit: What the norm of the newest step was limited to; inf: nothing.
        num_refused: Steps refused for another reason than a loss scale too large: DeepSpeed counts all together.
        norm: Of a step that was refused so; None: ask the engine.
    """

    def __init__(self, optimizer: Any) -> None:
        self.guard: StepGuard | None = None
        self.clipping: Clipping | None = None
        self.limit: Tensor | None = None
        self.num_refused = 0
        self._fixed_limit = optimizer.clip_grad or torch.inf  # DeepSpeed's 0 means none
        self.norm: Tensor | None = None
        self._optimizer = optimizer
        self._scaled_norm: Tensor | None = None
        self._update_scale = optimizer._update_scale
        optimizer._update_scale = self._judge
        if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
            self._compute = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = self._note_norm
        else:
            self._compute = optimizer._get_norm_groups
            optimizer._get_norm_groups = self._note_norm_groups

    def _note_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = self._compute(*args, **kwargs)
        self._scaled_norm = torch.as_tensor(norm, dtype=torch.float32)
        return norm

    def _note_norm_groups(self) -> Any:
        groups = self._compute()
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in groups])
        # DeepSpeed gives a group whose norm is not finite -1
        norms = torch.where(norms >= 0, norms, torch.inf)
        self._scaled_norm = torch.linalg.vector_norm(norms)
        return groups

    def _judge(self, has_overflow: bool = False) -> None:
        """What DeepSpeed calls with what it thinks of the step so far."""
        scaled, self._scaled_norm, self.norm = self._scaled_norm, None, None
        scale = self._optimizer.loss_scale  # that of these gradients
        self._update_scale(has_overflow)
        norm = torch.tensor(torch.inf) if has_overflow or scaled is None else scaled / scale
        self._clip(norm)
        if self.guard is None:
            return
        if has_overflow or scaled is None:
            self.guard.judge(norm)
            self.num_refused += (
                not self._optimizer.dynamic_loss_scale
            )  # no scaler looks for its scale
            return
        if bool(self.guard.judge(norm)):
            self._optimizer.overflow = True
            self.num_refused += 1
            self.norm = norm

    def _clip(self, norm: Tensor) -> None:
        self.limit = torch.full_like(norm, self._fixed_limit)
        if self.clipping is not None:
            self.limit = torch.minimum(self.limit, self.clipping.limit(norm))
            limit = float(self.limit)
            self._optimizer.clip_grad = limit if limit < torch.inf else 0.0


class StepGuardMixin:
    """For a strategy: what is asked about the steps that its ZeRO optimizer makes."""

    deepspeed_engine: Any
    _step_guard: ZeroStepGuard

    @property
    def guard(self) -> StepGuard | None:
        """Refuses steps, inside the engine's."""
        return self._step_guard.guard

    @guard.setter
    def guard(self, guard: StepGuard | None) -> None:
        self._step_guard.guard = guard

    @property
    def clipping(self) -> Clipping | None:
        """A limit of the norm beside the fixed one."""
        return self._step_guard.clipping

    @clipping.setter
    def clipping(self, clipping: Clipping | None) -> None:
        self._step_guard.clipping = clipping

    @property
    def clip_threshold(self) -> Tensor | None:
        """What the gradients of the last step were scaled down to where they were above."""
        return self._step_guard.limit

    @property
    def grad_norm(self) -> Tensor | None:
        """Global norm before clipping of the last optimizer step."""
        if self._step_guard.norm is not None:
            return self._step_guard.norm
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm, dtype=torch.float32)

    @property
    def num_overflows(self) -> int:
        """Optimizer steps skipped because a gradient was not finite under a loss scale."""
        return int(self.deepspeed_engine.skipped_steps) - self._step_guard.num_refused
