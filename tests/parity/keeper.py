"""An optimizer as strangers write them: it keeps numbers, strings and lists, of parameters, groups and the whole model.

Every one of them changes the next step, so that a resume without it shows.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Keeper(torch.optim.Optimizer):
    """Gradient descent along the mean of the last gradients, in steps that depend on all that it has kept.

    Args:
        model: Model whose parameters are optimized.
        lr: Step size.
        by_shard: Whether values of a parameter are those of this rank's shard, as in optimizers that know no shards.
        has_top: Whether its state dict has a key of its own.
    """

    def __init__(self, model: nn.Module, *, lr: float, by_shard: bool, has_top: bool) -> None:
        parameters = list(model.parameters())
        groups = [  # two, of which DeepSpeed makes two flat partitions
            {"params": [p for p in parameters if (p.ndim > 1) == is_matrix], "shrink": torch.ones(()), "trace": []}
            for is_matrix in (True, False)
        ]
        super().__init__(groups, {"lr": lr})
        self._by_shard, self._has_top = by_shard, has_top
        self.num_calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_calls += 1
        state: Any = self.state
        state["count"] = state.get("count", 0) + 1  # under a string, and no dict
        whole = state["whole"]
        whole["sum"] = whole.get("sum", 0.0) + 1 / state["count"]
        for group in self.param_groups:
            group["shrink"] *= 0.9  # in place
            group["trace"].append(0.01)  # in place
            top = 0.05 * self.num_calls if self._has_top else 0.0
            scale = float(group["shrink"]) + 0.1 * whole["sum"] + sum(group["trace"]) + top
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"] * scale)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state.update(num_steps=0, size=0.0, history=[], phase="first")
        state["num_steps"] += 1
        own = grad.to_local() if isinstance(grad, DTensor) else grad  # [elements of this rank]
        of_all = grad.full_tensor() if isinstance(grad, DTensor) else grad
        size = own if self._by_shard else of_all.double().norm().float()  # 0-dim, or as `own`
        state["size"] = 0.5 * state["size"] + float(size.abs().mean()) if own.numel() else 0.0
        if self._by_shard:
            state["history"] = [*state["history"], own.clone()][-2:]
            own = torch.stack(state["history"]).mean(0)
        scale = lr / (1 + state["size"] + 0.1 * state["num_steps"]) * (2.0 if state["phase"] == "first" else 1.0)
        state["phase"] = "later" if state["num_steps"] > 2 else "first"
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter.data).sub_(own, alpha=scale)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"num_calls": self.num_calls} if self._has_top else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_calls = state_dict["num_calls"] if self._has_top else 0
        super().load_state_dict(state_dict)
