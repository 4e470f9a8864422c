"""What each kind of reference costs in a plan: the weights of a copy, a forward pass, or time before the first step."""

from pathlib import Path

import pytest
import torch
from support import composed_config, resolved

from recipes.config.check.preference import list_references
from recipes.model.flops import flops_per_sample
from recipes.plan.hardware import Cluster, find_cluster
from recipes.plan.plan import Plan, make_plan
from recipes.plan.references import ReferenceCost, describe_references, plan_references
from recipes.plan.roofline import Rates, get_rates

RUN = ("recipe=dpo", f"data.path={__file__}", "tokenizer=bytes", "model=gpt2_nano", "global_batch_size=8")
ON_H100: Rates = get_rates("NVIDIA H100 80GB HBM3", tflops={"fp32": 67.0, "bf16": 989.0}, bandwidth=3.35e12)


def make_cluster() -> Cluster:
    return find_cluster("h100x8", per_node=1, num_nodes=1, interconnect=None, memory_gib=None)


def plan(*overrides: str) -> tuple[Plan, dict[str, ReferenceCost]]:
    run, cluster = resolved(composed_config(*RUN, *overrides), Path("unused")), make_cluster()
    planned = make_plan(run, cluster, rates=ON_H100)
    costs = plan_references(run, planned, list_references(run), cluster, rates=ON_H100)
    return planned, {cost.kind: cost for cost in costs}


def test_a_frozen_copy_takes_its_weights_and_a_forward_pass_and_a_precomputed_reference_neither() -> None:
    planned, costs = plan()
    assert list(costs) == ["precomputed", "frozen_copy"], "the chosen one first"
    copy, before = costs["frozen_copy"], costs["precomputed"]
    assert copy.added_bytes == pytest.approx(4 * planned.num_parameters, rel=0.01)
    assert before.added_bytes == before.added_seconds == 0
    assert planned.times is not None
    assert before.seconds_before == pytest.approx(planned.times.forward_seconds / 8, rel=1e-9)
    assert copy.seconds_before == 0
    assert copy.added_seconds is not None
    # a third of a step is forward, but for clipping and the optimizer
    assert 0.15 < copy.added_seconds / planned.times.step_seconds < 0.45
    with_copy, again = plan("task.reference=frozen_copy")
    assert list(again) == ["frozen_copy", "precomputed"]
    assert again["frozen_copy"].added_seconds == pytest.approx(copy.added_seconds, rel=1e-9)
    assert planned.flops is not None
    assert with_copy.flops is not None
    assert with_copy.flops.palm == pytest.approx(planned.flops.palm * 4 / 3, rel=1e-9)


def test_an_adapter_switched_off_takes_a_forward_pass_and_no_weights() -> None:
    planned, costs = plan("adapter=lora")
    assert list(costs) == ["adapter_off", "precomputed"], "no copy of weights that are frozen"
    off = costs["adapter_off"]
    assert off.added_seconds is not None
    assert off.added_seconds > 0
    assert off.added_bytes < 0.01 * off.peak_bytes
    [_, row, _] = describe_references([*costs.values()])
    assert row.split()[:2] == ["adapter_off", "(here)"]
    without, other = plan("adapter=lora", "task.reference=precomputed")
    assert list(other) == ["precomputed", "adapter_off"]
    of_all, _ = plan()
    assert of_all.flops is not None
    assert planned.flops is not None
    assert without.flops is not None
    assert planned.flops.palm - without.flops.palm == pytest.approx(of_all.flops.palm / 3, rel=1e-9)


def test_kto_measures_the_answer_to_another_prompt_too() -> None:
    planned, costs = plan("loss=kto", "data.kind=answers")
    assert planned.times is not None
    assert costs["precomputed"].seconds_before == pytest.approx(2 * planned.times.forward_seconds / 8, rel=1e-9)


@pytest.mark.parametrize("overrides", [("recipe=simpo",), ("task=reward", "loss=bradley_terry"), ("loss=orpo",)])
def test_what_asks_no_reference_has_none_in_its_plan(overrides: tuple[str, ...]) -> None:
    typed = [each for each in RUN if not (each.startswith("recipe=") and overrides[0].startswith("recipe="))]
    run = resolved(composed_config(*typed, *overrides), Path("unused"))
    assert list_references(run) == []
    assert list(describe_references([])) == []


def test_a_pair_has_the_flops_of_two_rows() -> None:
    planned, _ = plan()
    with torch.device("meta"):
        run = resolved(composed_config(*RUN), Path("unused"))
        of_row = flops_per_sample(run.make_model(), (run.seq_len or 0,))
    assert of_row is not None
    assert planned.flops is not None
    assert planned.flops.palm == 2 * of_row.palm
