"""Optimizer state is loaded from a checkpoint; hyper-parameters stay those of the run's config."""

import torch
from torch import nn

from recipes.checkpoint.shards import load_optimizer
from recipes.numerics.ema import NAME as EMA_KEY
from recipes.optimizer.adafactor import Adafactor


def test_state_is_loaded_and_hyper_parameters_stay() -> None:
    """The saved `fused` would leave the step counter on the wrong device."""
    weight = nn.Parameter(torch.ones(4))
    saving = torch.optim.AdamW([weight], lr=1.0, fused=False)
    weight.grad = torch.ones(4)
    saving.step()
    loading = torch.optim.AdamW([weight], lr=0.5, fused=True)
    load_optimizer(loading, saving.state_dict(), {})
    [group] = loading.param_groups
    assert (group["fused"], group["lr"], group["params"]) == (True, 0.5, [weight])
    state = loading.state[weight]
    assert float(state["step"]) == 1
    assert torch.equal(state["exp_avg"], saving.state[weight]["exp_avg"])


def test_state_takes_the_dtype_of_the_weights_when_a_run_resumes_in_another_precision() -> None:
    for saved_dtype, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        saved_weight, weight = (nn.Parameter(torch.ones(4, dtype=kind)) for kind in (saved_dtype, dtype))
        saving, loading = (torch.optim.AdamW([each], lr=0.5, fused=True) for each in (saved_weight, weight))
        saved_weight.grad = torch.full_like(saved_weight, 2.0)
        saving.step()
        state = saving.state_dict()
        state["state"][0][EMA_KEY] = torch.full((4,), 3.0, dtype=torch.float32)
        load_optimizer(loading, state, {})
        loaded = loading.state[weight]
        assert loaded["exp_avg"].dtype == dtype
        assert loaded[EMA_KEY].dtype == torch.float32, "an average of bfloat16 weights is kept in float32"
        weight.grad = torch.full_like(weight, 2.0)
        loading.step()
        assert float(loaded["step"]) == 2


def test_what_an_optimizer_keeps_in_float32_stays_so() -> None:
    """The statistics of bfloat16 weights, which torch would cast to their dtype."""

    def make() -> Adafactor:
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
        settings = {"lr": 0.1, "beta2_decay": -0.8, "eps": (1e-7, 1e-3), "clip_threshold": 1.0, "weight_decay": 0.0}
        return Adafactor(model, **settings)  # type: ignore[arg-type]

    saving, loading = make(), make()
    saving.step()
    load_optimizer(loading, saving.state_dict(), {})
    for loaded, saved in zip(loading.state.values(), saving.state.values(), strict=True):
        assert loaded["step"] == saved["step"]
        for name in loaded.keys() - {"step"}:
            assert loaded[name].dtype == torch.float32
            assert torch.equal(loaded[name], saved[name])
