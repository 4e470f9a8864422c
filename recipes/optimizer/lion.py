"""Lion (arXiv 2302.06675): sign of momentum, 4 bytes of state per parameter; elementwise, so it works on any shard.

Every weight moves by the learning rate in every step, about 3 to 10 times as far as with AdamW, so use a learning rate
smaller by that factor and a weight decay larger by it.
"""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.optimizer.groupwise import GroupwiseOptimizer
from recipes.optimizer.param_groups import decay_groups
from recipes.optimizer.shards import local


class Lion(GroupwiseOptimizer):
    """Lion with decoupled weight decay.

    Args:
        model: Model whose trainable parameters are optimized; vectors are not decayed.
        lr: Peak learning rate, the distance that a weight moves in a step; the scheduler multiplies it.
        betas: Weight of the momentum in the update, and in the next momentum.
        weight_decay: Weight decay of matrices, multiplied by the learning rate.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Annotated[float, "> 0"],
        betas: tuple[Annotated[float, ">= 0, < 1"], Annotated[float, ">= 0, < 1"]],
        weight_decay: Annotated[float, ">= 0"],
    ) -> None:
        defaults = {"lr": lr, "betas": (float(betas[0]), float(betas[1]))}
        super().__init__(decay_groups(model, weight_decay=weight_decay), defaults)

    @override
    def step_chunk(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        weights = [local(parameter) for parameter in parameters]
        grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        momenta = [local(self._momentum(parameter)) for parameter in parameters]
        directions = torch._foreach_lerp(momenta, grads, 1 - beta1)  # shapes of the shards
        torch._foreach_sign_(directions)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, directions, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, grads, 1 - beta2)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)  # shape of the parameter, and its sharding
        momentum: Tensor = state["exp_avg"]
        return momentum
