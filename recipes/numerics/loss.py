"""Losses as a sum and a number of targets, both of which can be added over micro-batches and ranks.

Shapes: B samples, V classes or tokens, N all targets of a batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # target without a loss; the default of F.cross_entropy


def widen(values: Tensor) -> Tensor:
    """Return float32, in which a sum of many terms keeps its digits; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy summed over all targets that are not ignored.

    Args:
        logits: [..., V] scores in any float dtype.
        targets: [...] class or token indices; `IGNORE_INDEX` carries no loss.

    Returns:
        A 0-dim float32 tensor, float64 for logits of that dtype, in nats.
    """
    # convert to float32 first: a bfloat16 sum of ones stops growing at 256
    return F.cross_entropy(
        widen(logits).flatten(0, -2),  # [N, V]
        targets.flatten(),  # [N]
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def regularizer_sum(logits: Tensor, targets: Tensor, *, label_smoothing: float, z_loss: float) -> Tensor:
    """Return the label smoothing and z-loss terms to add to `cross_entropy_sum`, summed over targets.

    Label smoothing (Szegedy et al. 2015, arXiv 1512.00567) as in `F.cross_entropy`: the target has probability
    1 - s + s / V, every other class s / V. The z-loss (PaLM, arXiv 2204.02311) is the weighted square of the
    log-sum-exp of the logits, which keeps them from drifting.

    Args:
        logits: [..., V] scores in any float dtype.
        targets: [...]; `IGNORE_INDEX` carries no loss.
        label_smoothing: s.
        z_loss: Weight of the square; 1e-4 in PaLM.

    Returns:
        A 0-dim float32 tensor, float64 for logits of that dtype, in nats.
    """
    flat_logits, flat_targets = widen(logits).flatten(0, -2), targets.flatten()  # [N, V], [N]
    carries_loss = flat_targets != IGNORE_INDEX  # [N]
    terms = torch.zeros_like(flat_targets, dtype=flat_logits.dtype)  # [N]
    if label_smoothing:
        # clamped, because IGNORE_INDEX is not a valid index; those terms are dropped below
        target_logits = flat_logits.gather(1, flat_targets.clamp(min=0)[:, None]).squeeze(1)  # [N]
        terms = terms + label_smoothing * (target_logits - flat_logits.mean(dim=1))
    if z_loss:
        terms = terms + z_loss * flat_logits.logsumexp(dim=1).square()
    return torch.where(carries_loss, terms, 0.0).sum()


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target, [...] float32, 0 if ignored; arguments as for `cross_entropy_sum`."""
    losses = F.cross_entropy(
        widen(logits).flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )  # [N]
    return losses.view_as(targets)


def sum_by_source(losses: Tensor, targets: Tensor, sources: Tensor, *, num_sources: int) -> Tensor:
    """Return the summed loss and number of targets of each source, [2, K] float64.

    Args:
        losses: [B, T], 0 for ignored targets.
        targets: [B, T]; `IGNORE_INDEX` is not counted.
        sources: [B], source of each sample, from 0.
        num_sources: K.
    """
    counts = (targets != IGNORE_INDEX).sum(dim=1)  # [B]
    per_sample = torch.stack([losses.double().sum(dim=1), counts.double()])  # [2, B]
    is_of = sources[:, None] == torch.arange(num_sources, device=sources.device)  # [B, K]
    # a matmul rather than `index_add`, which is nondeterministic on a GPU
    return per_sample @ is_of.double()


def mean_per_sample(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of each sample over its targets.

    Args:
        logits: [B, ..., V] scores in any float dtype.
        targets: [B, ...]; `IGNORE_INDEX` carries no loss.

    Returns:
        [B] float32, in nats; NaN for a sample without targets.
    """
    num_targets = (targets.reshape(len(targets), -1) != IGNORE_INDEX).sum(dim=1)  # [B]
    return token_losses(logits, targets).view(len(targets), -1).sum(dim=1) / num_targets


def count_targets(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored, as a 0-dim int64 tensor on the device of `targets`."""
    return (targets != IGNORE_INDEX).sum()
