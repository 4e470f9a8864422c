"""Refuses a step inside a ZeRO optimizer, where its gradient norm is first known: as an overflow that leaves the
loss scale alone. One comparison a step."""

from typing import Any

import torch
from torch import Tensor

from recipes.step_guard import StepGuard


class ZeroStepGuard:
    """Goes into a DeepSpeed optimizer, between the norm and the update.

    DeepSpeed 0.19.8 computes the norm as a local of its step; from there to the update it calls `_update_scale`.

    Args:
        optimizer: DeepSpeed's.

    Attributes:
        guard: Judges; None: nothing is refused.
        num_refused: Steps refused for another reason than a loss scale too large: DeepSpeed counts all together.
        norm: Of a step that was refused so; None: ask the engine.
    """

    def __init__(self, optimizer: Any) -> None:
        self.guard: StepGuard | None = None
        self.num_refused = 0
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
        self._update_scale(has_overflow)
        if self.guard is None:
            return
        if has_overflow or scaled is None:
            self.guard.judge(torch.tensor(torch.inf))
            self.num_refused += (
                not self._optimizer.dynamic_loss_scale
            )  # no scaler looks for its scale
            return
        norm = scaled / self._optimizer.loss_scale
        if bool(self.guard.judge(norm)):
            self._optimizer.overflow = True
            self.num_refused += 1
            self.norm = norm
