"""Mixup and cutmix: a pair of images with their targets becomes two mixtures, each of both.

Shapes: C channels, S x S pixels, V classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How pairs are mixed.

    A share of the first image is kept, drawn from a beta distribution, and the rest is the second one's: at every pixel
    by mixup (Zhang et al. 2017, arXiv:1710.09412), in a rectangle by cutmix (Yun et al. 2019, arXiv:1905.04899).
    The other sample of the pair is the same with both exchanged.

    Args:
        mixup: Both parameters of the beta distribution of mixup; 0: no mixup.
        cutmix: Those of cutmix; 0: no cutmix.
        probability: Share of the pairs that are mixed.
        switch: Share of these that are mixed by cutmix, where both are on.
        epochs: Passes over the training data whose pairs are mixed, the first ones; None: all.
    """

    mixup: float
    cutmix: float
    probability: float
    switch: float
    epochs: float | None

    @property
    def is_on(self) -> bool:
        """Whether any pair is mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    def __call__(
        self,
        first: dict[str, Tensor],
        second: dict[str, Tensor],
        rng: Generator,
        *,
        epoch: float,
        num_classes: int,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return both samples mixed: inputs [C, S, S], targets as probabilities [V].

        Targets are probabilities in pairs that are not mixed, too, so that all batches are of one kind.

        Args:
            first: inputs [C, S, S] float; targets, a class [] or numbers [V].
            second: As the first.
            rng: Generator of the pair.
            epoch: Passes over the training data before the pair.
            num_classes: V.
        """
        images = first["inputs"], second["inputs"]
        targets = _to_probabilities(first["targets"], num_classes), _to_probabilities(second["targets"], num_classes)
        is_over = self.epochs is not None and epoch >= self.epochs
        if not is_over and rng.random() < self.probability:
            uses_cutmix = self.cutmix > 0 and (self.mixup == 0 or rng.random() < self.switch)
            alpha = self.cutmix if uses_cutmix else self.mixup
            kept = float(rng.beta(alpha, alpha))
            if uses_cutmix:
                rows, columns = draw_box(kept, (images[0].shape[-2], images[0].shape[-1]), rng)
                images, kept = exchange(*images, rows, columns)
            else:
                images = blend(*images, kept)
            targets = blend(*targets, kept)
        of_both = zip((first, second), images, targets, strict=True)
        mixed = [sample | {"inputs": image, "targets": target} for sample, image, target in of_both]
        return mixed[0], mixed[1]

    def describe(self) -> str:
        """Return the settings, for the log and the fingerprint; empty: nothing is mixed."""
        if not self.is_on:
            return ""
        parts = [f"{name}={getattr(self, name)}" for name in ("mixup", "cutmix") if getattr(self, name)]
        parts += [f"mix_probability={self.probability}"] if self.probability < 1 else []
        parts += [f"mix_switch={self.switch}"] if self.mixup and self.cutmix else []
        parts += [f"mix_epochs={self.epochs}"] if self.epochs is not None else []
        return ", ".join(parts)


def blend(first: Tensor, second: Tensor, kept: float) -> Pair:
    """Return the mean of two tensors with the weight `kept` of the first, and that with the weight of the second."""
    return first * kept + second * (1.0 - kept), second * kept + first * (1.0 - kept)


def exchange(first: Tensor, second: Tensor, rows: slice, columns: slice) -> tuple[Pair, float]:
    """Exchange a rectangle of two images [C, H, W]; the second value is the share of the pixels that stay."""
    of_first, of_second = first.clone(), second.clone()
    of_first[:, rows, columns] = second[:, rows, columns]
    of_second[:, rows, columns] = first[:, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return (of_first, of_second), 1.0 - area / float(first.shape[-2] * first.shape[-1])


def draw_box(kept: float, size: tuple[int, int], rng: Generator) -> tuple[slice, slice]:
    """Return rows and columns of a rectangle with the share 1 - `kept` of the area, cut off where it leaves the image.

    Args:
        kept: Share of the pixels outside.
        size: H and W.
        rng: Draws its center.
    """
    sides = []
    for length in size:
        side, center = int(length * (1.0 - kept) ** 0.5), int(rng.integers(length))
        sides.append(slice(max(center - side // 2, 0), min(center + (side + 1) // 2, length)))
    return sides[0], sides[1]


def _to_probabilities(target: Tensor, num_classes: int) -> Tensor:
    """Return a class as probabilities [V] float32; numbers as they are."""
    if target.is_floating_point():
        return target
    probabilities: Any = F.one_hot(target, num_classes)
    return probabilities.to(torch.float32)  # type: ignore[no-any-return]
