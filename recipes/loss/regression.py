"""Losses of numbers: squared, absolute, and squared only near zero.

Shapes: B samples, V numbers per sample.
"""

from abc import abstractmethod
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.loss import Batch, Example, TargetLoss
from recipes.numerics.loss import widen


class _Regression(TargetLoss):
    """Loss of each number; targets are [B, V], or [B] for one number per sample, NaN where a number is unknown."""

    target_kinds: ClassVar[tuple[str, ...]] = ("values",)

    @abstractmethod
    def compare(self, predicted: Tensor, known: Tensor) -> Tensor:
        """Return the loss of each number, all three of one shape and dtype."""

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted = _match(widen(outputs), targets)
        carries = self.has_loss(targets)
        known = torch.where(carries, targets, 0.0).to(predicted.dtype)
        return torch.where(carries, self.compare(predicted, known), 0.0)

    @override
    def to_metrics(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of the samples of which all numbers are known, [N, V] or [N]."""
        targets = batch["targets"]
        predicted = _match(widen(outputs), targets)
        carries = self.has_loss(targets).reshape(len(targets), -1).all(dim=1)  # [B]
        return predicted[carries], targets[carries].to(predicted.dtype)

    @override
    def to_predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the `values`, in the shape of the targets."""
        return {"values": _match(widen(outputs), batch["targets"])}

    @override
    def example(self, num_outputs: int, kind: str) -> Example:
        targets = torch.arange(2 * num_outputs, dtype=torch.float32).view(2, num_outputs)  # [2, V]
        offered = f"numbers [N, {num_outputs}] and numbers [N, {num_outputs}]"
        return Example(targets + 1, targets, offered, "a metric of torchmetrics.regression")


def _match(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs in the shape of the targets: [B, 1] becomes [B], which would else broadcast to [B, B].

    Raises:
        ValueError: The shapes differ otherwise.
    """
    if outputs.shape == (*targets.shape, 1):
        return outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
        raise ValueError(
            f"{shapes}: a loss of numbers needs one output per number; set model.num_classes to their number"
        )
    return outputs


class MSE(_Regression):
    """Mean squared error over all numbers."""

    @override
    def compare(self, predicted: Tensor, known: Tensor) -> Tensor:
        return F.mse_loss(predicted, known, reduction="none")


class MAE(_Regression):
    """Mean absolute error over all numbers; less led by outliers than the squared one."""

    @override
    def compare(self, predicted: Tensor, known: Tensor) -> Tensor:
        return F.l1_loss(predicted, known, reduction="none")


class Huber(_Regression):
    """Squared up to a difference of delta, linear beyond (Huber 1964, doi 10.1214/aoms/1177703732).

    Args:
        delta: Difference from which on the loss is linear, in the unit of the targets.
    """

    def __init__(self, *, delta: Annotated[float, "> 0"]) -> None:
        self._delta = delta

    @override
    def compare(self, predicted: Tensor, known: Tensor) -> Tensor:
        return F.huber_loss(predicted, known, delta=self._delta, reduction="none")
