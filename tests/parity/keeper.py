"""An optimizer as strangers write them: it keeps numbers, words and lists, of parameters, groups and the whole model.

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
    """

    def __init__(self, model: nn.Module, *, lr: float, by_shard: bool) -> None:
        super().__init__([{"params": list(model.parameters()), "shrink": 1.0}], {"lr": lr})
        self._by_shard = by_shard
        self.num_calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_calls += 1
        whole = self.state["whole"]
        whole["sum"] = whole.get("sum", 0.0) + 1 / self.num_calls
        for group in self.param_groups:
            group["shrink"] *= 0.9
            for parameter in group["params"]:
                self._update(parameter, group["lr"] * (group["shrink"] + 0.1 * whole["sum"]))
        return loss

    def _update(self, parameter: Tensor, lr: float) -> None:
        grad = parameter.grad
        assert grad is not None
        state = self.state[parameter]
        if not state:
            state.update(num_steps=0, size=0.0, history=[], phase="first")
        state["num_steps"] += 1
        own = grad.to_local() if isinstance(grad, DTensor) else grad  # [elements of this rank]
        of_all = grad.full_tensor() if isinstance(grad, DTensor) else grad
        size = own if self._by_shard else of_all.double().norm().float()  # 0-dim
        state["size"] = 0.5 * state["size"] + float(size.abs().mean()) if own.numel() else 0.0
        if self._by_shard:
            state["history"] = [*state["history"], own.clone()][-2:]
            own = torch.stack(state["history"]).mean(0)
        scale = lr / (1 + state["size"] + 0.1 * state["num_steps"]) * (2.0 if state["phase"] == "first" else 1.0)
        state["phase"] = "later" if state["num_steps"] > 2 else "first"
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).sub_(own, alpha=scale)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"num_calls": self.num_calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_calls = state_dict["num_calls"]
        super().load_state_dict(state_dict)
