"""SGD with momentum, fused into one kernel per group, except for shards, which torch 2.13 does not support."""

from typing import Annotated

import torch
from torch import nn

from recipes.optimizer.param_groups import decay_groups


def sgd(
    model: nn.Module,
    *,
    lr: Annotated[float, "> 0"],
    momentum: Annotated[float, ">= 0, <= 1"],
    nesterov: bool,
    weight_decay: Annotated[float, ">= 0"],
) -> torch.optim.SGD:
    """Return the optimizer of a model.

    Args:
        model: Model whose trainable parameters are optimized; vectors are not decayed.
        lr: Peak learning rate; the scheduler multiplies it.
        momentum: Momentum factor.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Weight decay of matrices.
    """
    groups = decay_groups(model, weight_decay=weight_decay)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
