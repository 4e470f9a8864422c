"""AdamW (arXiv 1711.05101), fused into one kernel per group."""

from typing import Annotated

import torch
from torch import nn

from recipes.optimizer.param_groups import decay_groups


def adamw(
    model: nn.Module,
    *,
    lr: Annotated[float, "> 0"],
    betas: tuple[Annotated[float, ">= 0, < 1"], Annotated[float, ">= 0, < 1"]],
    eps: Annotated[float, "> 0"],
    weight_decay: Annotated[float, ">= 0"],
) -> torch.optim.AdamW:
    """Return the optimizer of a model.

    Args:
        model: Model whose trainable parameters are optimized; vectors are not decayed.
        lr: Peak learning rate; the scheduler multiplies it.
        betas: Decay rates of the first and second moment, per optimizer step.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay of matrices.
    """
    groups = decay_groups(model, weight_decay=weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=(float(betas[0]), float(betas[1])), eps=eps, fused=True)
