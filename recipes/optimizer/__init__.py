"""Optimizers, one per file: model -> torch optimizer with its weight-decay groups."""

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist


@runtime_checkable
class DividesWork(Protocol):
    """An optimizer whose arithmetic is worth dividing over the ranks that hold the same weights and gradients.

    Attributes:
        replicas: These ranks; None: each does all. Where the parameters are DTensors, their mesh says which they are.
        product_dtype: Of its matrix products; None is bfloat16 on a GPU and float32 elsewhere.
    """

    replicas: dist.ProcessGroup | None
    product_dtype: torch.dtype | None
