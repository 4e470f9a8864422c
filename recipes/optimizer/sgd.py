"""SGD with momentum, fused into one kernel per group, but for shards, where torch 2.13 has none."""

from typing import Annotated

import torch
from torch import nn

from recipes.optimizer.param_groups import decay_groups


def sgd(
    model: nn.Module,
    *,
    lr: Annotated[float, "> 0, < inf"],
    momentum: Annotated[float, ">= 0, <= 1"],
    nesterov: bool,
    weight_decay: Annotated[float, ">= 0"],
) -> torch.optim.SGD:
    """Return the optimizer of a model.

    Args:
        model: Its trainable parameters are optimized; vectors are not decayed.
        lr: Peak learning rate; the scheduler multiplies it.
        momentum: Fraction of the last update that is added to the next.
        nesterov: Use the gradient after one more momentum step.
        weight_decay: Of matrices.
    """
    groups = decay_groups(model, weight_decay=weight_decay)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
