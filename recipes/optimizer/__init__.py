"""Optimizers, one per file: model -> torch optimizer with weight-decay groups."""

import itertools
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


@runtime_checkable
class AveragesWeights(Protocol):
    """An optimizer that averages the weights; the model holds the average during validation."""

    def hold_average(self, held: bool) -> None:
        """Swap the average or the training weights into the model; idempotent."""


def hold_averages(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module, *, held: bool) -> None:
    """Swap averaged or training weights into a model; does nothing for optimizers without averages."""
    averaging = [optimizer for optimizer in optimizers if isinstance(optimizer, AveragesWeights)]
    for optimizer in averaging:
        optimizer.hold_average(held)
    stages = getattr(model, "parts", {}).values()  # pipeline stages, which are not submodules of `model`
    for module in itertools.chain(model.modules(), stages) if averaging else ():
        if isinstance(module, FSDPModule):
            module.reshard()  # weights left gathered by the last forward pass are stale


@runtime_checkable
class DividesWork(Protocol):
    """An optimizer that distributes its computation over ranks with the same weights and gradients.

    Attributes:
        replicas: Process group of these ranks; None: every rank computes everything. For DTensors, taken from the mesh.
        product_dtype: Dtype of matmuls; None: bfloat16 on a GPU, float32 elsewhere.
    """

    replicas: dist.ProcessGroup | None
    product_dtype: torch.dtype | None
