"""Binary cross-entropy: each class is a yes or no of its own, several of which may hold for one sample.

Shapes: B samples, V classes, N samples that carry loss.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.loss import MULTICLASS, MULTILABEL, Batch, Example, TargetLoss, describe_labels
from recipes.numerics.loss import IGNORE_INDEX, widen


class BCE(TargetLoss):
    """Binary cross-entropy with logits, in nats.

    Targets are labels [B, V] from 0 to 1, each a target of its own and NaN where it is unknown; or class indices [B],
    whose loss is the mean over the V classes (Wightman et al. 2021, arXiv 2110.00476). Both give the mean over all
    elements, as `F.binary_cross_entropy_with_logits` does.

    Args:
        pos_weight: Factor of the loss of a label of 1, one number or V: above 1 for labels that are rare.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ("labels", "classes")

    def __init__(
        self, *, pos_weight: Annotated[float, "> 0"] | Sequence[Annotated[float, "> 0"]] | None = None
    ) -> None:
        self._pos_weight = None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float64)  # [] or [V]

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = widen(outputs)  # [B, V]
        carries = self.has_loss(targets)  # [B, V] or [B]
        pos_weight = None if self._pos_weight is None else self._pos_weight.to(logits)
        if targets.is_floating_point():
            labels = torch.where(carries, targets, 0.0).to(logits.dtype)  # [B, V]
        else:
            labels = F.one_hot(targets.clamp(min=0), logits.shape[-1]).to(logits.dtype)  # [B, V]
        losses = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=pos_weight, reduction="none")  # [B, V]
        if not targets.is_floating_point():
            losses = losses.mean(dim=-1)  # [B]
        return torch.where(carries, losses, 0.0)

    @override
    def to_metrics(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return probabilities [N, V], and classes [N] or labels [N, V] int64, without samples of unknown labels."""
        targets = batch["targets"]
        # probabilities, because torchmetrics treats values as logits only if one of them is outside [0, 1]
        preds = widen(outputs).sigmoid()  # [B, V]
        if targets.is_floating_point():
            carries = ~targets.isnan().any(dim=-1)  # [B]
            return preds[carries], targets[carries].round().long()
        carries = targets != IGNORE_INDEX  # [B]
        return preds[carries], targets[carries]

    @override
    def to_predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the `probabilities` [B, V], and the most probable `class` [B] or the `labels` [B, V], 0 or 1."""
        probabilities = widen(outputs).sigmoid()
        if batch["targets"].is_floating_point():
            return describe_labels(probabilities)
        return {"class": probabilities.argmax(dim=-1), "probabilities": probabilities}

    @override
    def example(self, num_outputs: int, kind: str) -> Example:
        outputs, probabilities = torch.eye(2, num_outputs), f"probabilities [N, {num_outputs}]"
        if kind == "classes":
            return Example(outputs, torch.tensor([0, num_outputs - 1]), f"{probabilities} and classes [N]", MULTICLASS)
        return Example(outputs, torch.eye(2, num_outputs), f"{probabilities} and labels [N, {num_outputs}]", MULTILABEL)
