"""Optimizers, one per file: model -> torch optimizer with its weight-decay groups."""

import itertools
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


@runtime_checkable
class AveragesWeights(Protocol):
    """An optimizer whose result is an average of the weights, which the model holds while it is validated."""

    def hold_average(self, held: bool) -> None:
        """Let the model hold the average, or its weights again; twice is as good as once."""


def hold_averages(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module, *, held: bool) -> None:
    """Let a model hold the averages of optimizers that keep them, or its weights again; nothing for any others."""
    averaging = [optimizer for optimizer in optimizers if isinstance(optimizer, AveragesWeights)]
    for optimizer in averaging:
        optimizer.hold_average(held)
    stages = getattr(model, "parts", {}).values()  # of a pipeline: their own parameters are no module's of `model`
    for module in itertools.chain(model.modules(), stages) if averaging else ():
        if isinstance(module, FSDPModule):
            module.reshard()  # what the last forward pass has left gathered is out of date


@runtime_checkable
class DividesWork(Protocol):
    """An optimizer whose arithmetic is worth dividing over the ranks that hold the same weights and gradients.

    Attributes:
        replicas: These ranks; None: each does all. Where the parameters are DTensors, their mesh says which they are.
        product_dtype: Of its matrix products; None is bfloat16 on a GPU and float32 elsewhere.
    """

    replicas: dist.ProcessGroup | None
    product_dtype: torch.dtype | None
