"""A training that draws its own batches, so that it runs in a Trainer as well as in a plain loop."""

from typing import Any

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

PIXELS, CLASSES = 64, 10


class HealthyRun(LightningModule):
    """One kind of training: a network, its batches and its optimizer.

    Args:
        num_steps: Of the run; schedules and changes of the data are placed relative to it.
        seed: Of weights and batches.
        batch_size: Samples a step.
    """

    batch_size = 32
    learning_rate = 1e-3

    def __init__(self, num_steps: int, seed: int, batch_size: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.num_steps = num_steps
        self.batch_size = batch_size or self.batch_size
        self.random = torch.Generator().manual_seed(seed)
        self.step_number = 0
        self.setup_run()

    def setup_run(self) -> None:
        """Create network and data."""
        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels / 16, dtype=torch.float32)  # [1797, 64], 0 to 1
        self.labels = torch.tensor(labels)  # [1797]
        norm = nn.BatchNorm1d(64) if self.batch_size > 4 else nn.LayerNorm(64)
        self.net = nn.Sequential(nn.Linear(PIXELS, 64), norm, nn.ReLU(), nn.Linear(64, CLASSES))

    @property
    def progress(self) -> float:
        """Fraction of the run that is over."""
        return self.step_number / self.num_steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the next batch, which the module draws itself."""
        loss = self.loss()
        self.step_number += 1
        return loss

    def loss(self) -> Tensor:
        """Return the loss of a new batch."""
        images, labels = self.draw()
        return F.cross_entropy(self.net(images), labels)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return images [B, 64] and labels [B]."""
        index = torch.randint(len(self.images), (self.batch_size,), generator=self.random)
        return self.images[index], self.labels[index]

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers from the generator of the run."""
        return torch.randn(shape, generator=self.random)

    def configure_optimizers(self) -> Any:
        """Return Adam; kinds with a schedule override it."""
        return Adam(self.parameters(), self.learning_rate, fused=True)


def mlp(size_in: int, hidden: int, size_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(size_in, hidden),
        nn.LayerNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, size_out),
    )


def per_step(optimizer: Optimizer, schedule: Any) -> tuple[list[Optimizer], list[dict[str, Any]]]:
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]
