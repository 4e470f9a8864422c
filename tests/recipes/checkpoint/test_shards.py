"""Optimizer state is loaded from a checkpoint; hyper-parameters stay those of the run's config."""

import torch
from torch import nn

from recipes.checkpoint.shards import load_optimizer


def test_state_is_loaded_and_hyper_parameters_stay() -> None:
    """The saved `fused` would leave the step counter on the wrong device."""
    weight = nn.Parameter(torch.ones(4))
    saving = torch.optim.AdamW([weight], lr=1.0, fused=False)
    weight.grad = torch.ones(4)
    saving.step()
    loading = torch.optim.AdamW([weight], lr=0.5, fused=True)
    load_optimizer(loading, saving.state_dict())
    [group] = loading.param_groups
    assert (group["fused"], group["lr"], group["params"]) == (True, 0.5, [weight])
    state = loading.state[weight]
    assert float(state["step"]) == 1
    assert torch.equal(state["exp_avg"], saving.state[weight]["exp_avg"])
