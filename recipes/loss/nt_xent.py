"""NT-Xent: a view of an image is to be nearer to its other view than to the views of all other images.

The softmax of a view runs over the whole global batch, so `recipes.task.contrastive` compares the projections of all
micro-batches and ranks before the first backward pass. It hands each micro-batch the gradient of the sum with respect
to its projections, and the loss of a micro-batch is then linear in them (GradCache, Gao et al. 2021, arXiv:2101.06983).

Shapes: B images of a micro-batch, n of a rank, N of the global batch, two views each; F numbers of a projection.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from recipes.loss import Batch, Loss, Term
from recipes.numerics.loss import widen

NUM_VIEWS = "num_views"
GRADIENT, COMPARED, UNIFORMITY = "projection_gradient", "compared_views", "uniformity"  # keys of a compared batch
_ROWS = 1024  # views whose similarities with all others are in memory at a time
_SHARPNESS = 2.0  # of the kernel of uniformity, as in its paper


class NTXent(Loss):
    """Cross-entropy of the similarity of each view with its other view, among all views of other images.

    SimCLR (Chen et al. 2020, arXiv:2002.05709, equation 1): similarities are cosines over the temperature, and the mean
    is over the 2 N views. Logged beside it: `pretext_accuracy`, the fraction of views that are nearest to their other
    view; `alignment`, the mean squared distance of the two; and `uniformity`, the logarithm of the mean
    exp(-2 d^2) over pairs of views of different images (Wang and Isola 2020, arXiv:2005.10242). Images without a
    target only fill up a validation, and are compared with nothing.

    Args:
        temperature: Divides the cosines: a smaller one weighs the nearest views of other images more.
    """

    reads: ClassVar[str] = "views"
    count_names: Sequence[str] = (NUM_VIEWS,)
    measures: ClassVar[Mapping[str, str]] = {
        "pretext_accuracy": "num_views",
        "alignment": "num_views",
        "uniformity": "num_views",
    }
    higher_is_better: ClassVar[tuple[str, ...]] = ("pretext_accuracy",)

    def __init__(self, *, temperature: Annotated[float, "> 0"]) -> None:
        self.temperature = temperature

    def carries(self, batch: Batch) -> Tensor:
        """Return which images of a batch are compared, [B] bool."""
        known = self.has_loss(batch["targets"])
        return known.reshape(len(known), -1).any(dim=1)

    @override
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {NUM_VIEWS: 2 * self.carries(batch).sum()}

    @override
    def __call__(self, outputs: Tensor, batch: Batch) -> list[Term]:
        """Return the terms of projections [B, 2, F]: among the global batch if they were compared, else the batch."""
        if GRADIENT in batch:
            objective = (widen(outputs) * batch[GRADIENT]).sum()
            return self.to_terms(batch[COMPARED], batch[UNIFORMITY], objective=objective)
        compared = self.compare(outputs, outputs, first=0, carries=self.carries(batch))
        return self.to_terms(compared, find_uniformity(compared.sum(dim=0)), objective=compared[:, 0].sum())

    def to_terms(self, compared: Tensor, uniformity: Tensor, *, objective: Tensor) -> list[Term]:
        """Return the loss and what is logged beside it.

        Args:
            compared: [B, 5], see `compare`.
            uniformity: [] of all views.
            objective: [] with the gradient of the sum of the losses.
        """
        loss, hits, distance, _, num_views = compared.detach().sum(dim=0).unbind()  # [] each
        measured = {"pretext_accuracy": hits, "alignment": distance, "uniformity": uniformity.detach() * num_views}
        return [
            Term(objective, per=NUM_VIEWS, in_loss=loss),
            *(Term(sum_, per=NUM_VIEWS, weight=0.0, logged_as=name) for name, sum_ in measured.items()),
        ]

    @override
    def per_sample(self, outputs: Tensor, batch: Batch) -> Tensor:
        compared: Any = batch.get(COMPARED)
        if compared is None:
            compared = self.compare(outputs, outputs, first=0, carries=self.carries(batch))
        losses: Tensor = compared[:, 0] / compared[:, 4]  # [B]
        return losses

    def compare(self, own: Tensor, every: Tensor, *, first: int, carries: Tensor) -> Tensor:
        """Compare the views of some images with all; a few rows at a time, which the backward pass computes again.

        Args:
            own: [n, 2, F] projections in any float dtype.
            every: [N, 2, F] projections of all images, of which those are `first` to `first + n - 1`.
            first: As above.
            carries: [N] bool, which images are compared.

        Returns:
            [n, 5] float32 or wider, sums over the two views of an image, 0 of one that is not compared: the loss, the
            views that are nearest to their other view, the squared distance from it, the kernel of uniformity over
            views of other images, and the views themselves. The loss is differentiable.
        """
        rows, columns = (F.normalize(widen(each).flatten(0, 1), dim=-1) for each in (own, every))  # [2 n, F], [2 N, F]
        places = torch.arange(2 * first, 2 * (first + len(own)), device=rows.device)  # [2 n]
        is_compared = carries.repeat_interleave(2)  # [2 N]
        parts = [
            checkpoint(
                _compare_rows,
                *(rows[start : start + _ROWS], columns, places[start : start + _ROWS], is_compared, self.temperature),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in range(0, len(rows), _ROWS)
        ]
        compared: Tensor = torch.cat(parts).view(len(own), 2, -1).sum(dim=1)  # [n, 5]
        return compared


def _compare_rows(rows: Tensor, columns: Tensor, places: Tensor, is_compared: Tensor, temperature: float) -> Tensor:
    """Return the columns of `NTXent.compare` for single views, [c, 5].

    Args:
        rows: [c, F], normalized.
        columns: [2 N, F], normalized.
        places: [c], the column of each row; its other view is in the column beside it.
        is_compared: [2 N] bool.
        temperature: Divides the cosines.
    """
    with torch.autocast(rows.device.type, enabled=False):
        similar = rows @ columns.T  # [c, 2 N]
    numbers, partners = torch.arange(len(columns), device=rows.device), places ^ 1
    is_self, is_partner = numbers == places[:, None], numbers == partners[:, None]  # [c, 2 N] each
    left_out = is_self | ~(is_compared | is_partner)  # a row that is not compared has a finite loss, which is dropped
    logits = (similar / temperature).masked_fill(left_out, -torch.inf)
    losses = F.cross_entropy(logits, partners, reduction="none")  # [c]
    with torch.no_grad():
        distances = 2 - 2 * similar  # squared, of normalized vectors
        kernel = torch.exp(-_SHARPNESS * distances).masked_fill(left_out | is_partner, 0.0).sum(dim=1)  # [c]
        hits = logits.argmax(dim=1) == partners  # [c]
        distance = distances.gather(1, partners[:, None]).squeeze(1)  # [c]
    found = torch.stack([losses, hits.to(losses), distance, kernel, torch.ones_like(losses)], dim=1)
    return torch.where(is_compared[places][:, None], found, 0.0)


def find_uniformity(sums: Tensor) -> Tensor:
    """Return the uniformity of all images, [], from the sums [5] of what `NTXent.compare` returns for them."""
    kernel, num_views = sums[3], sums[4]
    return torch.log(kernel / (num_views * (num_views - 2)).clamp(min=1))
