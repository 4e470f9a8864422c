"""Classification: one class per sample, loss per sample."""

from typing import ClassVar

import torch
from torch import Tensor

from recipes.numerics.loss import mean_per_sample
from recipes.task.base import Batch, TrainingTask


class Classification(TrainingTask):
    """Trains an image classifier, [B, C, H, W] -> logits [B, V]. Arguments: see `TrainingTask`."""

    input_kind: ClassVar[str] = "images"

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(_last(batch["inputs"]))  # [B, V], compute dtype
        return self.cross_entropy_sum(logits, batch["targets"]), logits

    def recipes_sample_losses(self, batch: Batch) -> Tensor:
        return mean_per_sample(self.model(_last(batch["inputs"])), batch["targets"])


def _last(images: Tensor) -> Tensor:
    """Return images [B, C, H, W] in channels-last memory format, which is fastest for convolutions."""
    return images.contiguous(memory_format=torch.channels_last)
