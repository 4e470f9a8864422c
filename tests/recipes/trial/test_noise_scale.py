"""The noise scale of linear regression, where it is known in closed form."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from recipes.mode.noise_scale import NoiseMeter, StepNorms, estimate_noise_scale

DIMENSIONS, DISTANCE = 20, 0.5
SMALL, NUM_MICRO_BATCHES, STEPS = 8, 8, 150


class Regression(LightningModule):
    """Weights that stay at a distance of 0.5 in each of 20 dimensions from those that made the targets."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(DIMENSIONS, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, 1.0)
        self.noise = noise

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return 0.5 * (self.layer(inputs) - targets).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(SMALL * NUM_MICRO_BATCHES * STEPS, DIMENSIONS, generator=generator)
        targets = inputs.sum(dim=1, keepdim=True) * (1 - DISTANCE)
        targets = targets + self.noise * torch.randn(len(inputs), 1, generator=generator)
        return DataLoader(TensorDataset(inputs, targets), batch_size=SMALL)


@pytest.mark.parametrize("noise", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_is_that_of_the_closed_form(noise: float, precision: Any) -> None:
    meter = NoiseMeter()
    trainer = Trainer(
        max_steps=STEPS, accumulate_grad_batches=NUM_MICRO_BATCHES, accelerator="cpu", precision=precision,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[meter],
    )  # fmt: skip
    trainer.fit(Regression(noise))
    assert len(meter.steps) == STEPS
    found = estimate_noise_scale(meter.steps, small=SMALL, large=SMALL * NUM_MICRO_BATCHES)
    # gradient of a sample: x (x · d - e); d²: squared distance, of the weights; its variance (n + 1) d² + n e²
    distance = DIMENSIONS * DISTANCE**2
    expected = (DIMENSIONS + 1) + DIMENSIONS * noise**2 / distance
    assert found.signal == pytest.approx(distance, rel=0.2)
    assert found.samples == pytest.approx(expected, rel=0.2)
    assert abs(found.samples - expected) < 4 * found.standard_error


def test_without_noise_the_scale_is_zero_and_without_signal_it_is_unknown() -> None:
    same = [StepNorms(small=4.0, large=4.0)] * 3
    assert estimate_noise_scale(same, small=1, large=4).samples == 0.0
    noise_alone = [StepNorms(small=4.0, large=1.0)] * 3
    assert estimate_noise_scale(noise_alone, small=1, large=4).samples == float("inf")
