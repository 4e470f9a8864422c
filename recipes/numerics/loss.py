"""Loss as a sum over targets and their number: the only form that adds up over micro-batches and ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # a target with this value carries no loss; the default of F.cross_entropy


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of all targets that carry loss, in float32.

    Args:
        logits: [..., V] scores in any float dtype.
        targets: [...] class or token indices; `IGNORE_INDEX` carries no loss.

    Returns:
        A 0-dim float32 tensor, in nats.
    """
    return F.cross_entropy(
        logits.float().flatten(0, -2),  # [N, V]
        targets.flatten(),  # [N]
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def regularizer_sum(
    logits: Tensor, targets: Tensor, *, label_smoothing: float, z_loss: float
) -> Tensor:
    """What training adds to `cross_entropy_sum`, summed over all targets that carry loss, in float32.

    Label smoothing (Szegedy et al. 2015, arXiv 1512.00567) as `F.cross_entropy` has it: the target has probability
    1 - s + s / V, every other class s / V. The z-loss (PaLM, arXiv 2204.02311) is the weighted square of the log of
    the normalizer, which keeps logits from drifting.

    Args:
        logits: [..., V] scores in any float dtype.
        targets: [...]; `IGNORE_INDEX` carries no loss.
        label_smoothing: s.
        z_loss: Weight of the square; PaLM takes 1e-4.
    """
    flat, wanted = logits.float().flatten(0, -2), targets.flatten()  # [N, V], [N]
    counts = wanted != IGNORE_INDEX
    each = torch.zeros_like(wanted, dtype=torch.float32)  # [N]
    if label_smoothing:
        of_target = flat.gather(1, wanted.clamp(min=0)[:, None]).squeeze(1)
        each = each + label_smoothing * (of_target - flat.mean(dim=1))
    if z_loss:
        each = each + z_loss * flat.logsumexp(dim=1).square()
    return torch.where(counts, each, 0.0).sum()


def mean_per_sample(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of each sample over its targets that carry loss, in float32; NaN where none does.

    Args:
        logits: [B, ..., V].
        targets: [B, ...].

    Returns:
        [B], in nats.
    """
    losses = F.cross_entropy(
        logits.float().flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )  # [N]
    num_targets = (targets.reshape(len(targets), -1) != IGNORE_INDEX).sum(dim=1)  # [B]
    return losses.view(len(targets), -1).sum(dim=1) / num_targets


def count_targets(targets: Tensor) -> Tensor:
    """Number of targets that carry loss, as a 0-dim int64 tensor on the device of `targets`."""
    return (targets != IGNORE_INDEX).sum()


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Number of targets whose class has the largest logit, as a 0-dim int64 tensor."""
    predictions = logits.argmax(dim=-1)  # [...]
    return torch.logical_and(predictions == targets, targets != IGNORE_INDEX).sum()
