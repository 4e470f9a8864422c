"""Losses of numbers: squared, absolute, and squared only near zero.

Shapes: B samples, V numbers per sample.
"""

from abc import abstractmethod
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.loss import TargetLoss, match
from recipes.numerics.loss import widen


class _Regression(TargetLoss):
    """Loss of each number; targets are [B, V], or [B] for one number per sample, NaN where a number is unknown."""

    target_kinds: ClassVar[tuple[str, ...]] = ("values",)

    @abstractmethod
    def compare(self, predicted: Tensor, known: Tensor) -> Tensor:
        """Return the loss of each number, all three of one shape and dtype."""

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted = match(widen(outputs), targets)
        carries = self.has_loss(targets)
        known = torch.where(carries, targets, 0.0).to(predicted.dtype)
        return torch.where(carries, self.compare(predicted, known), 0.0)


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
