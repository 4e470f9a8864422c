"""Every operator of a plan runs without storage."""

from typing import Any

import pytest
import torch
from plan_cases import COMMON, GPT, cpu_cluster
from support import ROOT, composed_config, resolved
from torch import nn
from torch._subclasses import fake_tensor

from recipes.plan.fake_rank import no_truncated_draws
from recipes.plan.plan import make_plan

OPTIMIZERS = sorted(path.stem for path in (ROOT / "conf/optimizer").glob("*.yaml"))


@pytest.mark.parametrize("option", OPTIMIZERS)
def test_no_operator_of_a_plan_is_run_on_real_tensors(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any, func: Any, *__: Any) -> None:
        raise AssertionError(f"{func} has no kernel for tensors without storage, and would allocate its arguments")

    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", refuse)
    assert (
        make_plan(
            resolved(composed_config(*COMMON, *GPT, f"optimizer={option}")), cpu_cluster(1), rates=None
        ).peak.total
        > 0
    )


def test_torch_still_has_no_kernel_of_fused_sgd_for_tensors_without_storage() -> None:
    """If this fails, `recipes/plan/fake_rank.py` need not register one."""
    registered = torch._C._dispatch_dump("aten::_fused_sgd_").splitlines()
    [ours] = [line for line in registered if line.startswith("Meta")]
    assert "fake_rank.py" in ours


def test_torch_still_reads_values_to_draw_within_bounds() -> None:
    """If this fails, `recipes/plan/fake_rank.py` need not keep models of one's own from it."""
    with fake_tensor.FakeTensorMode():
        with pytest.raises(fake_tensor.DataDependentOutputException):
            nn.init.trunc_normal_(torch.empty(3))
        with no_truncated_draws():
            assert nn.init.trunc_normal_(torch.empty(3), std=0.02).shape == (3,)


def test_a_model_that_draws_within_bounds_is_planned() -> None:
    typed = ["data=digits", "task=classification", "recipe=single_fp32", "trainer.accelerator=cpu"]
    typed += ["model._target_=dataset_cases.Truncated", "+model.num_classes=10"]
    plan = make_plan(resolved(composed_config(*typed)), cpu_cluster(1), rates=None)
    assert plan.num_parameters == 64 * 10 + 10
