"""Losses of images with captions: an image is to be nearer to its caption than to those of all other images.

Every pair is compared with the whole global batch, so `recipes.task.image_text` compares the features of all micro-
batches and ranks before the first backward pass. It hands each micro-batch the gradient of the sum with respect to its
features, and the loss of a micro-batch is then linear in them (GradCache, Gao et al. 2021, arXiv:2101.06983). Scale and
bias are in every pair: each micro-batch gets its share of their gradient, once.

Shapes: B pairs of a micro-batch, n of a rank, N of the global batch; F numbers of a feature.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from recipes.loss import Batch, Loss, Term
from recipes.numerics.loss import widen

NUM_PAIRS = "num_pairs"
GRADIENTS, COMPARED = "feature_gradients", "compared_pairs"  # keys of a compared batch
_ROWS = 1024  # pairs whose similarities with all others are in memory at a time
Repeated = Literal["drop", "keep"]


class Features(NamedTuple):
    """What a model of images and captions returns.

    Attributes:
        images: [B, F] in the compute dtype, of any length.
        captions: [B, F], likewise.
        log_scale: [1], the logarithm of what multiplies the cosines.
        bias: [1], what is added to them.
    """

    images: Tensor
    captions: Tensor
    log_scale: Tensor
    bias: Tensor


class Pairs(NamedTuple):
    """What is known of the pairs that features belong to.

    Attributes:
        caption: [N] int64, equal for equal captions.
        image: [N] int64, equal for copies of an image.
        carries: [N] bool, False for what only fills up a validation, and is compared with nothing.
    """

    caption: Tensor
    image: Tensor
    carries: Tensor


class PairLoss(Loss):
    """A loss of cosines of all images with all captions of a global batch, divided by its number of pairs.

    Logged beside it: `image_to_caption_accuracy`, the fraction of images whose own caption is the nearest of the batch,
    and `caption_to_image_accuracy`, the reverse, both without those that are the same; `repeated_captions`, the
    fraction of pairs with a caption that the batch has again; and `logit_scale`, what multiplies the cosines.

    Args:
        repeated_captions: Whether pairs with the same caption, or the same image, are dropped from the negatives of
            each other (`drop`), or count as negatives although they are none (`keep`), as in open_clip.
    """

    reads: ClassVar[str] = "pairs"
    count_names: Sequence[str] = (NUM_PAIRS,)
    measures: ClassVar[Mapping[str, str]] = {
        "image_to_caption_accuracy": "num_pairs",
        "caption_to_image_accuracy": "num_pairs",
        "repeated_captions": "num_pairs",
        "logit_scale": "num_pairs",
    }
    higher_is_better: ClassVar[tuple[str, ...]] = ("image_to_caption_accuracy", "caption_to_image_accuracy")

    def __init__(self, *, repeated_captions: Repeated) -> None:
        self._drops = repeated_captions == "drop"

    @abstractmethod
    def losses(self, logits: Tensor, reverse: Tensor, places: Tensor, is_left_out: Tensor) -> Tensor:
        """Return the loss of some pairs, [c] float32 or wider.

        Args:
            logits: [c, N], of an image with every caption.
            reverse: [c, N], of a caption with every image.
            places: [c], the column of each pair itself.
            is_left_out: [c, N] bool, columns that are no negatives.
        """

    @override
    def complete(self, batch: Batch) -> dict[str, Any]:
        numbers = torch.zeros_like(batch["targets"])
        return {**batch, "caption": numbers, "image": numbers}

    def pairs(self, batch: Batch) -> Pairs:
        """Return what is known of the pairs of a batch."""
        return Pairs(batch["caption"], batch["image"], self.has_loss(batch["targets"]))

    @override
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {NUM_PAIRS: self.has_loss(batch["targets"]).sum()}

    @override
    def __call__(self, outputs: Features, batch: Batch) -> list[Term]:
        """Return the terms: of pairs among the global batch if they were compared, else among the batch."""
        if GRADIENTS in batch:
            parts = zip(outputs, batch[GRADIENTS], strict=True)
            objective = torch.stack([(widen(value) * gradient).sum() for value, gradient in parts]).sum()
            return self.to_terms(batch[COMPARED], objective=objective, log_scale=outputs.log_scale)
        compared = self.compare(outputs, outputs, self.pairs(batch), first=0)
        return self.to_terms(compared, objective=compared[:, 0].sum(), log_scale=outputs.log_scale)

    def to_terms(self, compared: Tensor, *, objective: Tensor, log_scale: Tensor) -> list[Term]:
        """Return the loss and what is logged beside it.

        Args:
            compared: [B, 5], see `compare`.
            objective: [] with the gradient of the sum of the losses.
            log_scale: [1].
        """
        loss, of_images, of_captions, repeated, num_pairs = compared.detach().sum(dim=0).unbind()  # [] each
        scale = widen(log_scale.detach()).exp().squeeze(0)
        sums = (of_images, of_captions, repeated, scale * num_pairs)
        return [
            Term(objective, per=NUM_PAIRS, in_loss=loss),
            *(
                Term(sum_, per=NUM_PAIRS, weight=0.0, logged_as=name)
                for name, sum_ in zip(self.measures, sums, strict=True)
            ),
        ]

    @override
    def per_sample(self, outputs: Features, batch: Batch) -> Tensor:
        compared: Any = batch.get(COMPARED)
        if compared is None:
            compared = self.compare(outputs, outputs, self.pairs(batch), first=0)
        losses: Tensor = compared[:, 0]  # [B]
        return losses

    def compare(self, own: Features, every: Features, pairs: Pairs, *, first: int) -> Tensor:
        """Compare some pairs with all; a few rows at a time, which the backward pass computes again.

        Args:
            own: Of n pairs, in any float dtype.
            every: Images and captions of all N pairs, of which those are `first` to `first + n - 1`.
            pairs: Of all N pairs.
            first: As above.

        Returns:
            [n, 5] float32 or wider, 0 of a pair that is not compared: the loss; whether the image is nearest to its own
            caption, and the caption to its image; whether the caption is repeated; and 1. The loss is differentiable.
        """
        images, captions, all_images, all_captions = (
            F.normalize(widen(each), dim=-1) for each in (own.images, own.captions, every.images, every.captions)
        )  # [n, F], [n, F], [N, F], [N, F]
        log_scale, bias = widen(own.log_scale), widen(own.bias)
        places = torch.arange(first, first + len(images), device=images.device)  # [n]
        parts = [
            checkpoint(
                self._compare_rows,
                *(images[start : start + _ROWS], captions[start : start + _ROWS], all_images, all_captions),
                *(log_scale, bias, places[start : start + _ROWS], pairs),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in range(0, len(images), _ROWS)
        ]
        return torch.cat(parts)

    def _compare_rows(
        self,
        images: Tensor,
        captions: Tensor,
        all_images: Tensor,
        all_captions: Tensor,
        log_scale: Tensor,
        bias: Tensor,
        places: Tensor,
        pairs: Pairs,
    ) -> Tensor:
        """Return the rows of `compare` of c pairs, [c, 5], from normalized features."""
        with torch.autocast(images.device.type, enabled=False):
            scale = log_scale.exp()  # [1]
            logits = scale * (images @ all_captions.T) + bias  # [c, N]
            reverse = scale * (captions @ all_images.T) + bias  # [c, N]
        is_self = torch.arange(len(all_images), device=places.device) == places[:, None]  # [c, N]
        has_same_caption = (pairs.caption == pairs.caption[places][:, None]) & pairs.carries & ~is_self  # [c, N]
        is_same = has_same_caption | (pairs.image == pairs.image[places][:, None]) & ~is_self
        left_out = ~(pairs.carries | is_self)  # a pair that is not compared has a finite loss, which is dropped
        losses = self.losses(logits, reverse, places, left_out | is_same if self._drops else left_out)  # [c]
        with torch.no_grad():
            others = ~(left_out | is_same | is_self)
            found = [_is_nearest(each, places, others) for each in (logits, reverse)]  # [c] each
            measured = [*found, has_same_caption.any(dim=1), torch.ones_like(places, dtype=torch.bool)]
        rows = torch.stack([losses, *(each.to(losses) for each in measured)], dim=1)
        return torch.where(pairs.carries[places][:, None], rows, 0.0)


def _is_nearest(logits: Tensor, places: Tensor, others: Tensor) -> Tensor:
    """Return whether the logit of each pair itself is above all others, [c] bool.

    Equal ones are no answer, and neither is the only one.
    """
    own = logits.gather(1, places[:, None]).squeeze(1)  # [c]
    return (own > logits.masked_fill(~others, -torch.inf).amax(dim=1)) & others.any(dim=1)


class Clip(PairLoss):
    """Cross-entropy of each image among all captions and of each caption among all images (CLIP, arXiv:2103.00020).

    The mean of both; cosines are multiplied by a learned scale.
    """

    @override
    def losses(self, logits: Tensor, reverse: Tensor, places: Tensor, is_left_out: Tensor) -> Tensor:
        both = (
            F.cross_entropy(each.masked_fill(is_left_out, -torch.inf), places, reduction="none")
            for each in (logits, reverse)
        )
        return torch.stack([*both]).mean(dim=0)  # [c]


class SigLip(PairLoss):
    """A decision for every image with every caption whether they belong together (SigLIP, arXiv:2303.15343).

    The negative log-likelihood of N N decisions, divided by N; cosines are multiplied by a learned scale, and a learned
    bias is added, as nearly all decisions are no.
    """

    @override
    def losses(self, logits: Tensor, reverse: Tensor, places: Tensor, is_left_out: Tensor) -> Tensor:
        own = logits.gather(1, places[:, None])  # [c, 1]
        signed = logits.scatter(1, places[:, None], -own)  # a decision is wrong with probability sigmoid(signed)
        # the reverse has the same decisions: each is made once, in the row of its image
        return F.softplus(signed).masked_fill(is_left_out, 0.0).sum(dim=1)  # [c]
