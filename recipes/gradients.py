"""Global gradient norm and clipping, for whole gradients and for shards: one pass, one all-reduce where sharded."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(
    parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
) -> Tensor:
    """Clip in place, where asked.

    Args:
        parameters: Those without a gradient are left out. Plain tensors or DTensors of one mesh.
        max_norm: Largest global L2 norm; None: not by norm.
        max_value: Largest absolute value of an element; None: not by value.

    Returns:
        The global L2 norm before clipping, over all shards, a 0-dim tensor; inf where a gradient is no finite
        number, as DeepSpeed has it. No host synchronisation.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in with_grad if parameter.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    if max_value is not None:
        nn.utils.clip_grad_value_(with_grad, max_value)
    return torch.where(norm.isfinite(), norm, torch.inf)
