"""Chunked cross-entropy of a language model head: computes the logits of one chunk of tokens at a time.

Shapes: N tokens, n tokens per chunk, W hidden size, V vocabulary size, V' with padding.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from recipes.numerics.collectives import gather_parts, reduce_parts
from recipes.numerics.linear import get_product_dtype, linear, weight_gradient
from recipes.numerics.loss import IGNORE_INDEX, token_losses

# Cross-entropy with a vocabulary sharded over ranks: reduces a few scalars per token instead of logits.
#
# Shapes: n tokens, N ranks, W hidden size, V tokens of the vocabulary, v = V' / N columns per rank, V' with padding.

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


class HeadLoss:
    """Cross-entropy with z-loss and label smoothing that never materializes [B, T, V] logits or their gradient.

    The gradients of hidden states and weight are computed with the loss, chunk by chunk, and scaled in the backward
    pass: three matmuls in total, as many as without chunks, and no recomputation. Rounding is as under autocast:
    matmuls in its dtype, everything of size V in float32. The gradient of the weight is summed over chunks in the
    dtype of the weight.

    Args:
        vocab_size: V; columns beyond it are padding.
        chunk_tokens: n; larger is faster until the device is saturated; needs 8 V' n bytes in bfloat16.
        label_smoothing: As in `regularizer_sum`.
        z_loss: As in `regularizer_sum`.
        vocabulary_group: Process group over which the vocabulary is sharded: the weight is this rank's rows, and the
            gradient of hidden states its contribution. None: not sharded.
        retains_graph: Whether the backward pass runs twice, for inputs and for weights.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        chunk_tokens: int,
        label_smoothing: float,
        z_loss: float,
        vocabulary_group: dist.ProcessGroup | None = None,
        retains_graph: bool = False,
    ) -> None:
        self.retains_graph = retains_graph
        self.vocab_size = vocab_size
        self.chunk_tokens = chunk_tokens
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self._group = vocabulary_group
        self._chunk: Callable[..., Gradients] = _loss_and_gradients
        if vocabulary_group is not None:
            self._chunk = functools.partial(loss_and_gradients_of_columns, group=vocabulary_group)

    def compile(self, **options: Any) -> None:
        """Compile the computation of a chunk: one kernel reads its logits and writes their gradient."""
        self._chunk = torch.compile(self._chunk, **options)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the logits [n, V] of a chunk, without padding; not differentiable."""
        logits = linear(hidden.to(weight.dtype), weight)
        if self._group is not None:
            logits = gather_parts(logits, self._group, dim=1)
        return logits[:, : self.vocab_size]

    def __call__(
        self, hidden: Tensor, weight: Tensor, *, targets: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the training objective and the loss, both summed over targets, 0-dim float32 in nats.

        The third value is the loss of each target, [B, T], 0 if ignored. Only the objective is differentiable.

        Args:
            hidden: [B, T, W], input of the head.
            weight: [V', W], weight of the head.
            targets: [B, T]; `IGNORE_INDEX` has no loss.
            scale: 0-dim, approximate gradient of the objective in the backward pass. Only float16 needs it: small
                gradients of the logits would otherwise be rounded to zero before they are scaled.
        """
        objective, loss, by_token = _HeadLoss.apply(hidden, weight, targets, scale, self)
        return objective, loss, by_token

    def token_losses(self, hidden: Tensor, weight: Tensor, *, targets: Tensor) -> Tensor:
        """Return the loss of each target, [B, T] float32, 0 if ignored; arguments as for `__call__`."""
        flat, flat_targets = hidden.flatten(0, -2), targets.flatten()  # [N, W], [N]
        weight = cast_weight(weight)
        parts = split(len(flat), self.chunk_tokens)
        losses = [token_losses(self.logits(flat[part], weight), flat_targets[part]) for part in parts]  # [n] each
        return torch.cat(losses).view_as(targets)

    def run_chunks(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor | None,
        *,
        differentiate: bool,
        trains_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return objective, loss, loss per target, and gradients of hidden states [N, W] and weight [V', W].

        The gradients are multiplied by `scale`; None if not needed: outside training, or for a frozen weight.
        """
        flat, flat_targets = hidden.flatten(0, -2), targets.flatten()  # [N, W], [N]
        weight_grad: Tensor | None = None  # [V', W], dtype of the weight
        hidden_grads: list[Tensor] = []  # [n, W] each
        cast = cast_weight(weight)  # [V', W], compute dtype
        objective = torch.zeros((), dtype=torch.float32, device=flat.device)
        loss = torch.zeros_like(objective)
        by_token: list[Tensor] = []  # [n] each
        for part in split(len(flat), self.chunk_tokens):
            added, plain, for_hidden, for_weight = self._chunk(
                flat[part].to(cast.dtype),
                cast,
                flat_targets[part],
                scale,
                vocab_size=self.vocab_size,
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
                differentiate=differentiate,
                trains_weight=trains_weight,
            )
            objective, loss = objective + added, loss + plain.sum()
            by_token.append(plain)
            if differentiate:
                hidden_grads.append(for_hidden.to(flat.dtype))
            if differentiate and trains_weight:
                # no zero initialization, which would cost a pass over all V' W elements
                weight_grad = for_weight.to(weight.dtype) if weight_grad is None else weight_grad.add_(for_weight)
        hidden_grad = torch.cat(hidden_grads) if len(hidden_grads) > 1 else hidden_grads[0] if differentiate else None
        return objective, loss, torch.cat(by_token).view_as(targets), hidden_grad, weight_grad


class _HeadLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass and saves them instead of the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, head: HeadLoss
    ) -> tuple[Tensor, Tensor, Tensor]:
        objective, loss, by_token, *gradients = head.run_chunks(
            hidden,
            weight,
            targets,
            scale,
            differentiate=any(ctx.needs_input_grad[:2]),
            trains_weight=ctx.needs_input_grad[1],
        )
        ctx.shape, ctx.scale, ctx.retains_graph = hidden.shape, scale, head.retains_graph
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(loss, by_token)
        return objective, loss, by_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_objective: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        factor = grad_objective if ctx.scale is None else grad_objective / ctx.scale  # 0-dim
        # in place: without retain_graph, there is no second backward pass through the same graph
        scale = torch.mul if ctx.retains_graph else Tensor.mul_
        of_weight = None if weight_grad is None else scale(weight_grad, factor)
        of_hidden = None if hidden_grad is None else scale(hidden_grad, factor).view(ctx.shape)
        return of_hidden, of_weight, None, None, None


def _loss_and_gradients(
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
) -> Gradients:
    """Return the objective of a chunk, 0-dim, its loss per target, [n], and gradients of x [n, W], weight [V', W].

    Args:
        x: [n, W], compute dtype.
        weight: [V', W], compute dtype.
        targets: [n].
        scale: Factor of the gradients, 0-dim; None: 1.
        vocab_size: V.
        label_smoothing: s; a target has the probability 1 - s + s / V, all others s / V.
        z_loss: Weight of the squared log-sum-exp of the logits.
        differentiate: Whether to compute gradients; if False, they are empty.
        trains_weight: Whether the weight is trained; if False, its gradient is empty.
    """
    logits = linear(x, weight)  # [n, V'], compute dtype
    if len(weight) > vocab_size:
        logits[:, vocab_size:] = float("-inf")
    carries_loss = targets != IGNORE_INDEX  # [n]
    columns = targets.clamp(min=0)[:, None]  # [n, 1]
    log_p = F.log_softmax(logits, dim=1, dtype=torch.float32)  # [n, V']
    target_log_p = log_p.gather(1, columns).squeeze(1)  # [n]
    losses = torch.where(carries_loss, -target_log_p, 0.0)  # [n]
    objective = losses.sum()
    log_normalizer = None
    if label_smoothing:
        mean_log_p = log_p[:, :vocab_size].mean(dim=1)  # [n]
        objective = objective + label_smoothing * torch.where(carries_loss, target_log_p - mean_log_p, 0.0).sum()
    if z_loss:
        log_normalizer = logits.gather(1, columns).squeeze(1).float() - target_log_p  # [n]
        objective = objective + z_loss * torch.where(carries_loss, log_normalizer.square(), 0.0).sum()
    if not differentiate:
        return objective, losses, x.new_empty(0), x.new_empty(0)
    del logits
    gradient = log_p.exp_()  # [n, V'] float32, of the logits from here on
    if log_normalizer is not None:
        gradient *= (1 + 2 * z_loss * log_normalizer)[:, None]
    if label_smoothing:
        gradient[:, :vocab_size] -= label_smoothing / vocab_size
    gradient.scatter_add_(1, columns, torch.full_like(columns, label_smoothing - 1.0, dtype=gradient.dtype))
    if scale is not None:
        gradient *= scale
    gradient = gradient.to(x.dtype)
    # mask rows without a target on tensors of width W instead of V, the narrow side of both matmuls
    mask = carries_loss[:, None].to(x.dtype)  # [n, 1]
    for_weight = weight_gradient(gradient, x * mask) if trains_weight else x.new_empty(0)  # [V', W]
    return objective, losses, linear(gradient, weight.T) * mask, for_weight


def split(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Yield chunks of `chunk_tokens`; only the last may be smaller, because every size is compiled separately."""
    size = -(-num_tokens // -(-num_tokens // chunk_tokens))
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def cast_weight(weight: Tensor) -> Tensor:
    """Return the weight in the matmul dtype of autocast."""
    return weight.to(get_product_dtype(weight))
