"""Schedule-Free AdamW (arXiv 2405.15682): averages the iterates instead of decaying the learning rate.

Gradients are computed at y, between the iterate z and its average x. The model holds y in training and x, the result
of a run, in validation. 12 bytes of state per parameter; elementwise, so it works on any shard.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from recipes.numerics.ema import OPTIMIZER_AVERAGE as AVERAGE
from recipes.optimizer.groupwise import GroupwiseOptimizer
from recipes.optimizer.param_groups import decay_groups
from recipes.optimizer.shards import in_chunks, local


class ScheduleFreeAdamW(GroupwiseOptimizer):
    """AdamW without a decay schedule: training can stop at any step.

    Args:
        model: Model whose trainable parameters are optimized; vectors are not decayed.
        lr: Learning rate after warm-up; the scheduler multiplies it. Its square weights a step in the average.
        betas: Weight of the average x in y, and decay rate of the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay of matrices.
    """

    accepts_flat_partitions: ClassVar[bool] = False
    keeps_average: ClassVar[bool] = True
    why_no_partitions: ClassVar[str] = (
        "a validation exchanges the weights for their average, and DeepSpeed computes with weights of its own"
    )
    state_of: ClassVar[str] = "schedule_free"  # name used in error messages
    float32_state: ClassVar[tuple[str, ...]] = (AVERAGE, "iterate")

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Annotated[float, "> 0"],
        betas: tuple[Annotated[float, "> 0, < 1"], Annotated[float, ">= 0, < 1"]],
        eps: Annotated[float, "> 0"],
        weight_decay: Annotated[float, ">= 0"],
    ) -> None:
        defaults = {"lr": lr, "betas": (float(betas[0]), float(betas[1])), "eps": eps}
        super().__init__(decay_groups(model, weight_decay=weight_decay), defaults)

    @override
    def step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        by_steps: dict[int, list[nn.Parameter]] = {}  # parameters without a gradient in some steps have taken fewer
        for parameter in parameters:
            by_steps.setdefault(self._state(parameter)["step"], []).append(parameter)
        for of_equal_steps in by_steps.values():
            for chunk in in_chunks(of_equal_steps):
                self._update(chunk, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states, lr, (beta1, beta2) = [self._state(parameter) for parameter in parameters], group["lr"], group["betas"]
        for state in states:
            state["step"] += 1
            state["sum_of_squared_lr"] += lr**2
        step, total = states[0]["step"], states[0]["sum_of_squared_lr"]  # the same of all of them
        weight = lr**2 / total if total else 1.0
        points = [local(parameter) for parameter in parameters]  # y; all lists: shapes of the shards
        grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        second, iterates, averages = (
            [local(state[name]) for state in states] for name in ("exp_avg_sq", "iterate", AVERAGE)
        )
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        denominators = torch._foreach_div(second, 1 - beta2**step)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        directions = torch._foreach_div(grads, denominators)
        torch._foreach_add_(directions, points, alpha=group["weight_decay"])
        torch._foreach_add_(iterates, directions, alpha=-lr)
        torch._foreach_lerp_(averages, iterates, weight)
        torch._foreach_copy_(points, torch._foreach_lerp(iterates, averages, beta1))

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = 0
            state["sum_of_squared_lr"] = 0.0
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            for name in self.float32_state:
                state[name] = parameter.detach().float().clone()
        return state

    @torch.no_grad()
    def hold_average(self, held: bool) -> None:
        """Swap the average x, or exactly the point y of the last step, into the model."""
        for group in self.param_groups:
            stepped = [parameter for parameter in group["params"] if AVERAGE in self.state.get(parameter, {})]
            for chunk in in_chunks(stepped):
                points = [local(parameter) for parameter in chunk]
                iterates, averages = (
                    [local(self.state[parameter][name]) for parameter in chunk] for name in ("iterate", AVERAGE)
                )
                beta1 = group["betas"][0]
                torch._foreach_copy_(points, averages if held else torch._foreach_lerp(iterates, averages, beta1))
