"""Classification: one class per sample, loss per sample."""

from typing import ClassVar

from torch import Tensor

from recipes.numerics.loss import mean_per_sample
from recipes.task.base import Batch, TrainingTask


class Classification(TrainingTask):
    """Trains a model of images [B, C, H, W] -> logits [B, V]. Arguments: see `TrainingTask`."""

    input_kind: ClassVar[str] = "images"

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["inputs"])  # [B, V], compute dtype
        return self.cross_entropy_sum(logits, batch["targets"]), logits

    def recipes_sample_losses(self, batch: Batch) -> Tensor:
        return mean_per_sample(self.model(batch["inputs"]), batch["targets"])
