"""An exponential moving average of the weights, kept as one more moment of the optimizer: 4 bytes a parameter.

So it is sharded as the moments are, saved, resumed under another strategy and rolled back with them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAME = "ema"


def average_weights(
    optimizer: torch.optim.Optimizer, *, decay: float, step: Callable[[], int]
) -> None:
    """Average after every step that an optimizer makes; one that is skipped leaves the average alone.

    Args:
        optimizer: torch's own, or the one inside an engine's.
        decay: Share of the average that stays at a step; it grows to that value, so that the first weights are
            forgotten: (1 + step) / (10 + step) at most, as in Exponential Moving Average of TensorFlow.
        step: Optimizer steps completed before the one under way.
    """

    def after_step(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        now = step()
        share = 1 - min(decay, (1 + now) / (10 + now))
        _average(own, share)

    optimizer.register_step_post_hook(after_step)


@torch.no_grad()
def _average(optimizer: torch.optim.Optimizer, share: float) -> None:
    averages, weights = [], []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue  # the step was refused
            state = optimizer.state[parameter]
            if NAME not in state:
                # in float32: a bfloat16 average would lose what a step adds to it
                state[NAME] = parameter.detach().float().clone()
                continue
            averages.append(_local(state[NAME]))
            weights.append(_local(parameter.detach()).float())
    if not averages:
        return
    refused = getattr(optimizer, "found_inf", None)  # known on the GPU alone
    if refused is None:
        torch._foreach_lerp_(averages, weights, share)
    else:
        made = (share * (1 - refused)).to(averages[0].dtype)
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight, made)


def _local(tensor: Tensor) -> Tensor:
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
