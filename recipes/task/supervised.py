"""Supervised learning on images or tensors: classes, labels or numbers, one loss per target."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from recipes.task.base import Batch, TrainingTask


class Supervised(TrainingTask):
    """Trains a model of images or tensors, [B, …] -> outputs [B, V], which the loss compares with the targets.

    Classes, several labels or numbers: what the targets are is between data and loss. Arguments: see `TrainingTask`.
    """

    input_kind: ClassVar[tuple[str, ...]] = ("images", "tensors")
    has_fixed_shapes: ClassVar[bool] = True

    @override
    def outputs(self, batch: Batch) -> Any:
        return self.model(_last(batch["inputs"]))  # [B, V], compute dtype


def _last(inputs: Tensor) -> Tensor:
    """Return images [B, C, H, W] in channels-last memory format, which is fastest for convolutions."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs
