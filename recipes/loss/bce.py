"""Binary cross-entropy: each class is a yes or no of its own, several of which may hold for one sample.

Shapes: B samples, V classes, N samples that carry loss.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.loss import MULTICLASS, MULTILABEL, Batch, Example, TargetLoss, Term, describe_labels
from recipes.numerics.loss import widen


class BCE(TargetLoss):
    """Binary cross-entropy with logits, in nats.

    Targets are labels [B, V] from 0 to 1, each a target of its own and NaN where it is unknown; or, of data whose
    targets are classes, indices [B] or probabilities [B, V] as from mixup, whose loss is the mean over the V classes
    (Wightman et al. 2021, arXiv 2110.00476). All give the mean over all elements, as
    `F.binary_cross_entropy_with_logits` does. The logged loss excludes label smoothing.

    Args:
        label_smoothing: s: a class has the target 1 - s + s / V, all others s / V; a label 1 - s / 2, or s / 2.
        threshold: Targets above it, such as both classes of a mixed image, become 1, all others 0; None: they stay.
        pos_weight: Factor of the loss of a label of 1, one number or V: above 1 for labels that are rare.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ("labels", "classes")

    def __init__(
        self,
        *,
        label_smoothing: Annotated[float, ">= 0, <= 0.999"] = 0.0,
        threshold: Annotated[float, ">= 0, < 1"] | None = None,
        pos_weight: Annotated[float, "> 0"] | Sequence[Annotated[float, "> 0"]] | None = None,
    ) -> None:
        self._label_smoothing = label_smoothing
        self._threshold = threshold
        self._pos_weight = None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float64)  # [] or [V]

    def _are_classes(self, targets: Tensor) -> bool:
        """Return whether targets are of one class per sample, as indices [B] or, from mixup, probabilities [B, V]."""
        return not targets.is_floating_point() or self.target_kind == "classes"

    @override
    def has_loss(self, targets: Tensor) -> Tensor:
        carries = super().has_loss(targets)  # [B, V] or [B]
        return carries.all(dim=-1) if self._are_classes(targets) and targets.is_floating_point() else carries

    @override
    def __call__(self, outputs: Tensor, batch: Batch) -> list[Term]:
        [term] = super().__call__(outputs, batch)
        if not self._label_smoothing:
            return [term]
        objective = self._losses(outputs, batch["targets"], label_smoothing=self._label_smoothing).sum()
        return [Term(objective, in_loss=term.sum)]

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._losses(outputs, targets, label_smoothing=0.0)

    def _losses(self, outputs: Tensor, targets: Tensor, *, label_smoothing: float) -> Tensor:
        logits = widen(outputs)  # [B, V]
        carries, are_classes = self.has_loss(targets), self._are_classes(targets)  # [B, V] or [B]
        if targets.is_floating_point():
            labels = targets.nan_to_num(nan=0.0).to(logits.dtype)  # [B, V]
        else:
            labels = F.one_hot(targets.clamp(min=0), logits.shape[-1]).to(logits.dtype)  # [B, V]
        if label_smoothing:
            labels = labels * (1.0 - label_smoothing) + label_smoothing / (logits.shape[-1] if are_classes else 2)
        if self._threshold is not None:
            labels = (labels > self._threshold).to(labels.dtype)
        pos_weight = None if self._pos_weight is None else self._pos_weight.to(logits)
        losses = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=pos_weight, reduction="none")  # [B, V]
        return torch.where(carries, losses.mean(dim=-1) if are_classes else losses, 0.0)

    @override
    def to_metrics(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return probabilities [N, V], and classes [N] or labels [N, V] int64, without samples of unknown labels."""
        targets = batch["targets"]
        # probabilities, because torchmetrics treats values as logits only if one of them is outside [0, 1]
        preds = widen(outputs).sigmoid()  # [B, V]
        if not self._are_classes(targets):
            carries = ~targets.isnan().any(dim=-1)  # [B]
            return preds[carries], targets[carries].round().long()
        carries = self.has_loss(targets)  # [B]
        classes = targets.argmax(dim=-1) if targets.is_floating_point() else targets  # [B]
        return preds[carries], classes[carries]

    @override
    def to_predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the `probabilities` [B, V], and the most probable `class` [B] or the `labels` [B, V], 0 or 1."""
        probabilities = widen(outputs).sigmoid()
        if not self._are_classes(batch["targets"]):
            return describe_labels(probabilities)
        return {"class": probabilities.argmax(dim=-1), "probabilities": probabilities}

    @override
    def example(self, num_outputs: int, kind: str) -> Example:
        outputs, probabilities = torch.eye(2, num_outputs), f"probabilities [N, {num_outputs}]"
        if kind == "classes":
            return Example(outputs, torch.tensor([0, num_outputs - 1]), f"{probabilities} and classes [N]", MULTICLASS)
        return Example(outputs, torch.eye(2, num_outputs), f"{probabilities} and labels [N, {num_outputs}]", MULTILABEL)
