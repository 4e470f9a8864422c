"""An optimizer step refused before it is made: weights and moments stay as they were. No device synchronisation."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class StepGuard(Protocol):
    """Whoever watches for spikes.

    Attributes:
        loss: Of the step about to be made, over all ranks, a 0-dim tensor; set before the backward pass ends.
    """

    loss: Tensor | None

    def judge(self, norm: Tensor) -> Tensor:
        """Whether a step with this global norm before clipping is refused, a 0-dim bool tensor; on every rank."""


def refuse(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], refused: Tensor
) -> None:
    """Let an optimizer step without any effect where a 0-dim bool tensor is true.

    A fused optimizer on a GPU reads the flag there. Any other loses its gradients: the flag is read, which costs
    nothing on a CPU and one wait for the device on a GPU.
    """
    own: Any = getattr(optimizer, "_optimizer", optimizer)  # not into Lightning's wrapper
    is_fused = all(group.get("fused") for group in own.param_groups)
    if (
        refused.is_cuda and is_fused and own.state
    ):  # the first step makes the moments, refused or not
        own.found_inf = refused.float()
    elif bool(refused):
        for parameter in parameters:
            parameter.grad = None
