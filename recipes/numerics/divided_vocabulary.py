"""Cross-entropy with a vocabulary sharded over ranks: reduces a few scalars per token instead of logits.

Shapes: n tokens, N ranks, W hidden size, V tokens of the vocabulary, v = V' / N columns per rank, V' with padding.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.numerics.collectives import reduce_parts
from recipes.numerics.linear import linear, weight_gradient
from recipes.numerics.loss import IGNORE_INDEX

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def loss_and_gradients_of_columns(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    *,
    vocab_size: int,
    label_smoothing: float,
    z_loss: float,
    differentiate: bool,
    trains_weight: bool,
    group: dist.ProcessGroup,
) -> Gradients:
    """Return objective, loss per target [n], and gradients of x [n, W] and weight [v, W], as `HeadLoss` on one device.

    Objective and losses are equal on all ranks; the gradient of x is this rank's contribution to the sum.

    Args:
        x: [n, W], compute dtype, equal on all ranks.
        weight: [v, W], compute dtype, rows of this rank.
        targets: [n].
        scale: Factor of the gradients, 0-dim; None: 1.
        vocab_size: V.
        label_smoothing: s; a target has the probability 1 - s + s / V, all others s / V.
        z_loss: Weight of the squared log-sum-exp of the logits.
        differentiate: Whether to compute gradients; if False, they are empty.
        trains_weight: Whether the weight is trained; if False, its gradient is empty.
        group: Process group, in the order of the columns.
    """
    first = group.rank() * len(weight)
    num_real = min(max(vocab_size - first, 0), len(weight))  # columns of this rank that are not padding
    carries_loss = targets != IGNORE_INDEX  # [n]
    is_own = (targets >= first) & (targets < first + len(weight))  # [n]
    columns = torch.where(is_own, targets - first, 0)[:, None]  # [n, 1]
    logits = linear(x, weight).float()  # [n, v]
    logits[:, num_real:] = float("-inf")
    largest = reduce_parts(logits.amax(dim=1), group, reduction="max")  # [n]
    logits.sub_(largest[:, None])  # shifted from here on, so that the log-sum-exp keeps its precision for large logits
    own_target = torch.where(is_own, logits.gather(1, columns).squeeze(1), 0.0)  # [n]
    own_sum = logits[:, :num_real].sum(dim=1)  # [n], for label smoothing
    own_normalizer = logits.exp().sum(dim=1)  # [n]
    normalizer, target, total = reduce_parts(torch.stack([own_normalizer, own_target, own_sum]), group)  # [n] each
    log_sum = normalizer.log()  # [n]
    losses = torch.where(carries_loss, log_sum - target, 0.0)  # [n]
    objective = losses.sum()
    if label_smoothing:
        smoothed = label_smoothing * (target - total / vocab_size)  # [n]
        objective = objective + torch.where(carries_loss, smoothed, 0.0).sum()
    log_normalizer = largest + log_sum  # [n]
    if z_loss:
        objective = objective + z_loss * torch.where(carries_loss, log_normalizer.square(), 0.0).sum()
    if not differentiate:
        return objective, losses, x.new_empty(0), x.new_empty(0)
    gradient = logits.sub_(log_sum[:, None]).exp_()  # [n, v], of the logits from here on
    if z_loss:
        gradient *= (1 + 2 * z_loss * log_normalizer)[:, None]
    if label_smoothing:
        gradient[:, :num_real] -= label_smoothing / vocab_size
    gradient.scatter_add_(1, columns, (is_own * (label_smoothing - 1.0))[:, None].to(gradient.dtype))
    if scale is not None:
        gradient *= scale
    gradient = gradient.to(x.dtype)
    # mask rows without a target on tensors of width W instead of v, the narrow side of both matmuls
    mask = carries_loss[:, None].to(x.dtype)  # [n, 1]
    for_weight = weight_gradient(gradient, x * mask) if trains_weight else x.new_empty(0)  # [v, W]
    return objective, losses, linear(gradient, weight.T) * mask, for_weight
