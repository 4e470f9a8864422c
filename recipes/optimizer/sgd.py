"""SGD with momentum, fused into one kernel a group where the engine allows it."""

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
    fused: bool,
) -> torch.optim.SGD:
    """Make the optimizer of a model.

    Args:
        model: Its trainable parameters are optimized; vectors are not decayed.
        lr: Peak learning rate, which the scheduler multiplies.
        momentum: Share of the last update kept.
        nesterov: Look ahead by one momentum step.
        weight_decay: Decay of matrices.
        fused: One kernel per group. Not under a loss scaler: it would hide the unscaled gradients.
    """
    groups = decay_groups(model, weight_decay=weight_decay)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused)
