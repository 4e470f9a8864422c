"""Base class of optimizers that update one parameter group at a time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from recipes.optimizer.shards import in_chunks


class GroupwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that updates one parameter group at a time."""

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; all ranks must have gradients for the same parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_group(group, [parameter for parameter in group["params"] if parameter.grad is not None])
        return loss

    def step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Update the parameters of a group that have a gradient; autograd is off."""
        for chunk in in_chunks(parameters):
            self.step_chunk(chunk, group)

    def step_chunk(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update some parameters of a group at once, for subclasses that do not override `step_group`."""
        raise NotImplementedError
