"""Exponential moving average of the weights, stored as optimizer state: 4 bytes per parameter.

It is therefore sharded, saved, resumed under another strategy and rolled back like all optimizer state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAME = "ema"
OPTIMIZER_AVERAGE = "average"  # state key of optimizers that average the weights themselves


def average_weights(optimizer: torch.optim.Optimizer, *, decay: float, step: Callable[[], int]) -> None:
    """Update the average after every optimizer step; a skipped step leaves it unchanged.

    Args:
        optimizer: torch optimizer, unwrapped from that of an engine.
        decay: Weight of the old average in the new one, limited to (1 + step) / (10 + step) as in TensorFlow's
            ExponentialMovingAverage, so that the initial weights are forgotten.
        step: Returns the optimizer steps completed before the current one.
    """

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        completed = step()
        _average(optimizer, 1 - min(decay, (1 + completed) / (10 + completed)))

    optimizer.register_step_post_hook(after_step)


@torch.no_grad()
def _average(optimizer: torch.optim.Optimizer, new_weight: float) -> None:
    averages, weights = [], []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue  # the step was skipped
            state = optimizer.state[parameter]
            if NAME not in state:
                # shape of the parameter, float32: in bfloat16 the small change of a step would be rounded away
                state[NAME] = parameter.detach().float().clone()
                continue
            averages.append(_local(state[NAME]))
            weights.append(_local(parameter.detach()).float())
    if not averages:
        return
    skipped = getattr(optimizer, "found_inf", None)  # 0.0 or 1.0, on a GPU known only to the device
    if skipped is None:
        torch._foreach_lerp_(averages, weights, new_weight)
    else:
        # 0-dim, where the averages are; _foreach_lerp_ accepts no tensor on the device as weight
        applied = (new_weight * (1 - skipped)).to(averages[0].device, averages[0].dtype)
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight, applied)


def _local(tensor: Tensor) -> Tensor:
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
