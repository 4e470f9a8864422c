"""Cross-entropy of classes or tokens, with label smoothing, z-loss, class weights and soft targets.

Shapes: B samples, V classes or tokens, N all targets of a batch.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from recipes.loss import NUM_TARGETS, Batch, TargetLoss, Term
from recipes.numerics.head_loss import HeadLoss
from recipes.numerics.loss import (
    IGNORE_INDEX,
    cross_entropy_sum,
    regularizer_sum,
    token_losses,
    widen,
)

_TARGET_WEIGHT = "target_weight"


class CrossEntropy(TargetLoss):
    """Cross-entropy of each target, in nats; the logged loss excludes label smoothing and the z-loss.

    Targets are indices [B, …], `IGNORE_INDEX` where there is no loss, or probabilities [B, V], NaN where there is none,
    as from mixup. As in `F.cross_entropy`, indices with class weights are divided by the sum of the weights of all
    targets, probabilities by their number.

    Args:
        label_smoothing: s: the target has the probability 1 - s + s / V, all others s / V.
        z_loss: Weight of the squared log-sum-exp of the logits; PaLM uses 1e-4.
        chunk_tokens: Language models: tokens whose logits are in memory at a time; None: all of a micro-batch.
        class_weights: Weight of each class, V numbers; logits are then not computed in chunks. None: all the same.
    """

    target_kinds: ClassVar[tuple[str, ...]] = ("classes", "probabilities")
    predicts: ClassVar[str] = "classes"

    def __init__(
        self,
        *,
        label_smoothing: Annotated[float, ">= 0, <= 0.999"] = 0.0,
        z_loss: Annotated[float, ">= 0"] = 0.0,
        chunk_tokens: Annotated[int, ">= 1"] | None = None,
        class_weights: Sequence[Annotated[float, ">= 0"]] | None = None,
    ) -> None:
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.chunk_tokens = chunk_tokens
        self._class_weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float64)  # [V]
        self.count_names = (NUM_TARGETS,) if class_weights is None else (NUM_TARGETS, _TARGET_WEIGHT)
        self._sum: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum

    @override
    def compile(self) -> None:
        self._sum = torch.compile(cross_entropy_sum)

    @override
    def in_chunks(
        self, vocab_size: int, *, vocabulary_group: ProcessGroup | None, retains_graph: bool
    ) -> HeadLoss | None:
        if self.chunk_tokens is None or self._class_weights is not None:
            return None
        return HeadLoss(
            vocab_size=vocab_size,
            chunk_tokens=self.chunk_tokens,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            vocabulary_group=vocabulary_group,
            retains_graph=retains_graph,
        )

    @override
    def has_loss(self, targets: Tensor) -> Tensor:
        return ~targets[..., 0].isnan() if targets.is_floating_point() else targets != IGNORE_INDEX

    @override
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        targets = batch["targets"]
        counts = super().counts(batch)
        if self._class_weights is not None:
            weights = self._class_weights.to(targets.device)  # [V]
            of_targets: Any = 1.0 if targets.is_floating_point() else weights[targets.clamp(min=0)]
            counts[_TARGET_WEIGHT] = (self.has_loss(targets) * of_targets).sum(dtype=torch.float64)
        return counts

    @override
    def counts_of_sample(self, num_targets: int | None) -> dict[str, int] | None:
        return super().counts_of_sample(num_targets) if self._class_weights is None else None

    @override
    def __call__(self, outputs: Tensor, batch: Batch) -> list[Term]:
        targets = batch["targets"]
        if targets.is_floating_point() or self._class_weights is not None:
            return [self._weighted(outputs[..., : self.num_outputs], targets)]
        loss_sum = self._sum(outputs, targets)
        if not (self.label_smoothing or self.z_loss):
            return [Term(loss_sum)]
        # padding columns are -inf, and label smoothing averages over all columns
        real = outputs[..., : self.num_outputs]
        added = regularizer_sum(real, targets, label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        return [Term(loss_sum + added, in_loss=loss_sum)]

    def _weighted(self, logits: Tensor, targets: Tensor) -> Term:
        """Return the term of soft targets or of class weights, logits [B, …, V] without padding."""
        per = NUM_TARGETS if self._class_weights is None else _TARGET_WEIGHT
        loss_sum = self.losses(logits, targets).sum()
        if not (self.label_smoothing or self.z_loss):
            return Term(loss_sum, per=per)
        objective = self._weighted_losses(logits, targets, label_smoothing=self.label_smoothing).sum()
        if self.z_loss:
            squares = widen(logits).logsumexp(dim=-1).square()  # [B, …]
            objective = objective + self.z_loss * torch.where(self.has_loss(targets), squares, 0.0).sum()
        return Term(objective, per=per, in_loss=loss_sum)

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point() or self._class_weights is not None:
            return self._weighted_losses(outputs[..., : self.num_outputs], targets, label_smoothing=0.0)
        return token_losses(outputs, targets)

    def _weighted_losses(self, logits: Tensor, targets: Tensor, *, label_smoothing: float) -> Tensor:
        carries = self.has_loss(targets)  # [B, …]
        flat = widen(logits).flatten(0, -2)  # [N, V]
        weights = None if self._class_weights is None else self._class_weights.to(flat)
        if targets.is_floating_point():
            known = torch.where(carries[..., None], targets, 0.0).flatten(0, -2).to(flat.dtype)  # [N, V]
        else:
            known = targets.flatten()  # [N]
        losses = F.cross_entropy(
            flat, known, weight=weights, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="none"
        )  # [N]
        return torch.where(carries, losses.view_as(carries), 0.0)
