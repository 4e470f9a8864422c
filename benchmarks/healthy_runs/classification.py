"""Classification of handwritten digits: batches, schedules, labels and data that change."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR

from .base import CLASSES, HealthyRun, per_step


class WeightDecay(HealthyRun):
    """SGD with momentum and weight decay: plateaus, no vanishing loss."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, fused=True)


class WarmRestarts(HealthyRun):
    """The learning rate returns to its maximum at the end of each cosine, and the loss rises."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), 0.2, momentum=0.9, fused=True)
        return per_step(optimizer, CosineAnnealingWarmRestarts(optimizer, self.num_steps // 31, T_mult=2))


class OneCycle(HealthyRun):
    """The learning rate rises 25-fold in the first third, and the loss with it."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), 0.01, momentum=0.9, fused=True)
        return per_step(optimizer, OneCycleLR(optimizer, max_lr=0.5, total_steps=self.num_steps + 1))


class Augmentation(HealthyRun):
    """Noise, shifts and erased pixels are switched on at half time: the loss jumps and stays higher."""

    def draw(self) -> tuple[Tensor, Tensor]:
        images, labels = super().draw()
        if self.progress >= 0.5:
            shift = int(torch.randint(-1, 2, (), generator=self.random))
            kept = torch.rand(images.shape, generator=self.random) > 0.2
            images = images.view(-1, 8, 8).roll(shift, dims=2).flatten(1)
            images = (images + 0.3 * self.normal(*images.shape)) * kept
        return images, labels


class FineTuning(HealthyRun):
    """Fine-tuning of weights that are good already, on inverted images, with a warm-up of the learning rate."""

    def setup_run(self) -> None:
        super().setup_run()
        optimizer = Adam(self.net.parameters(), 1e-3)
        for _ in range(200):
            optimizer.zero_grad()
            HealthyRun.loss(self).backward()
            optimizer.step()
        self.images = 0.7 * self.images + 0.3 * (1 - self.images)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), 5e-4, fused=True)
        return per_step(optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 500)))


class NewClasses(HealthyRun):
    """A class is added at every tenth of the run: its samples are confidently taken for others at first."""

    def setup_run(self) -> None:
        super().setup_run()
        self.all_images, self.all_labels = self.images, self.labels

    def draw(self) -> tuple[Tensor, Tensor]:
        known = self.all_labels <= 1 + int(self.progress * 10)
        self.images, self.labels = self.all_images[known], self.all_labels[known]
        return super().draw()


class NoisyLabels(HealthyRun):
    """A tenth of the labels is wrong and small batches are memorised: a few samples carry the loss."""

    batch_size = 4

    def setup_run(self) -> None:
        super().setup_run()
        wrong = torch.rand(len(self.labels), generator=self.random) < 0.1
        self.labels = torch.where(wrong, torch.randint(CLASSES, self.labels.shape, generator=self.random), self.labels)


class RareClass(HealthyRun):
    """One class in a hundred has a hundred times the weight: one batch in four has most of the loss."""

    def loss(self) -> Tensor:
        images, labels = self.draw()
        is_rare = (labels == 9) & (torch.rand(labels.shape, generator=self.random) < 0.1)
        kept = is_rare | (labels != 9)
        losses = F.cross_entropy(self.net(images), labels, reduction="none")  # [B]
        return (losses * torch.where(is_rare, 100.0, 1.0) * kept).mean()


class VerySmallData(HealthyRun):
    """Sixteen samples, memorized."""

    batch_size = 4

    def setup_run(self) -> None:
        super().setup_run()
        self.images, self.labels = self.images[:16], self.labels[:16]
