"""Losses of numbers: squared, absolute, and squared only near zero.

Shapes: B samples, V numbers per sample.
"""

from abc import abstractmethod
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.loss import Batch, TargetLoss, match
from recipes.numerics.loss import widen


class _Regression(TargetLoss):
    """Loss of each number; targets are [B, V], or [B] for one number per sample, NaN where a number is unknown.

    A model begins with outputs near 0 and changes them by small steps, so numbers that are far from 0 or large take it
    long: it learns (target - center) / scale, which the loss compares. Metrics and predictions are in the unit of the
    targets again.

    Args:
        center: What is subtracted from targets, such as their mean.
        scale: What divides them after that, such as their standard deviation.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ("values",)

    def __init__(self, *, center: Annotated[float, "> -1e30, < 1e30"], scale: Annotated[float, "> 0, < 1e30"]) -> None:
        self._center = center
        self._scale = scale

    @abstractmethod
    def compare(self, predicted: Tensor, known: Tensor) -> Tensor:
        """Return the loss of each number, all three of one shape and dtype."""

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted = match(widen(outputs), targets)
        carries = self.has_loss(targets)
        scaled = (targets - self._center) / self._scale
        known = torch.where(carries, scaled, 0.0).to(predicted.dtype)
        return torch.where(carries, self.compare(predicted, known), 0.0)

    @override
    def to_metrics(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().to_metrics(self._to_unit(outputs), batch)

    @override
    def to_predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return super().to_predictions(self._to_unit(outputs), batch)

    def _to_unit(self, outputs: Tensor) -> Tensor:
        return widen(outputs) * self._scale + self._center


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
        delta: Difference from which on the loss is linear, in units of `scale`.
        center: As of the squared loss.
        scale: As of the squared loss.
    """

    def __init__(
        self,
        *,
        delta: Annotated[float, "> 0"],
        center: Annotated[float, "> -1e30, < 1e30"],
        scale: Annotated[float, "> 0, < 1e30"],
    ) -> None:
        super().__init__(center=center, scale=scale)
        self._delta = delta

    @override
    def compare(self, predicted: Tensor, known: Tensor) -> Tensor:
        return F.huber_loss(predicted, known, delta=self._delta, reduction="none")
