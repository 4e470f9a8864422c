"""One class per sample: loss and accuracy per sample."""

from typing import ClassVar

import torch
from torch import Tensor

from recipes.loss import count_correct, count_targets, cross_entropy_sum
from recipes.task.learning import Batch, LearningTask


class Classification(LearningTask):
    """A model of images [B, C, H, W] -> logits [B, V]. Arguments: see `LearningTask`."""

    input_kind: ClassVar[str] = "images"

    def loss_and_counts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["inputs"])  # [B, V], compute dtype
        loss_sum = cross_entropy_sum(logits, batch["targets"])
        counts = [count_targets(batch["targets"]), count_correct(logits, batch["targets"])]
        return loss_sum, torch.stack(counts)

    def val_metrics(self, sums: list[float]) -> dict[str, float]:
        loss_sum, num_samples, num_correct = sums
        return {"val/loss": loss_sum / num_samples, "val/accuracy": num_correct / num_samples}
