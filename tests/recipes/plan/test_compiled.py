"""What a compiled block keeps, against torch's compiler and against runs on a GPU."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import COMMON, GPT, cpu_cluster
from plan_steps import step_of
from support import composed_config, resolved
from torch.profiler import ProfilerActivity, profile

from recipes.blocks import list_blocks
from recipes.plan.hardware import GIB, find_cluster
from recipes.plan.places import sum_kept
from recipes.plan.plan import Plan, make_plan
from recipes.plan.step import record_step
from recipes.plan.trace import ACTIVATIONS

H100 = Path(__file__).parents[3] / "benchmarks/results/gpu_nvidia_h100_80gb_hbm3.json"
RUNS: dict[str, dict[str, Any]] = {
    name: row["figures"] for name, row in json.loads(H100.read_text())["throughput"]["rows"].items()
}
QUICK = ("gpt2", "llama_160m", "llama_1b, fp8")  # two seconds each


def _plan(*overrides: str) -> Plan:
    cluster = find_cluster("h100", per_node=1, num_nodes=1, interconnect=None, memory_gib=None)
    config = composed_config("mode=plan", "data=random_tokens", "log_every=10", *overrides)
    return make_plan(resolved(config), cluster, rates=None)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RUNS])
def test_a_plan_of_an_h100_is_within_5_percent_of_its_run(name: str) -> None:
    run = RUNS[name]
    planned = _plan(*run["typed"].split(), "save_every=null", "callbacks.sample_text=null").peak.total / GIB
    assert planned == pytest.approx(run["allocated_peak_gib"], rel=0.05)
    assert planned == pytest.approx(run["planned_peak_gib"], rel=0.001)  # as the table of measurements says


def _block_keeps(is_compiled: bool) -> dict[str, int]:
    step = replace(step_of(GPT, 1), is_compiled=is_compiled)
    return {place: sizes[ACTIVATIONS] for place, sizes in sum_kept(record_step(step)).items()}


@pytest.mark.slow
def test_a_compiled_block_keeps_what_inductor_saves() -> None:
    step = step_of(GPT, 1)
    block = list_blocks(step.make_model())[1].train()
    hidden = torch.randn(len(step.make_batch()["inputs"]), 128, 256, requires_grad=True)
    compiled = torch.compile(block)
    compiled(hidden)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = compiled(hidden)  # it and all that is saved are live at the end
    recorder: Any = profiler.profiler
    live = sum(event.nbytes() for event in recorder.kineto_results.events() if event.name() == "[memory]")
    assert out.requires_grad
    assert _block_keeps(is_compiled=True)["block 1"] == pytest.approx(live, rel=1e-3)


def test_what_is_kept_per_sample_does_not_depend_on_the_plan_before() -> None:
    run = ["recipe=single_bf16", "model=llama_160m", "model.num_layers=6", "seq_len=256"]
    one, eight = (_plan(*run, f"micro_batch_size={size}", f"global_batch_size={size}") for size in (1, 8))
    one_kept, eight_kept = (max(moment.held.get(ACTIVATIONS, 0) for moment in plan.moments) for plan in (one, eight))
    assert eight_kept == pytest.approx(8 * one_kept, rel=1e-3)


def test_a_block_that_cannot_be_compiled_keeps_what_it_keeps_in_eager_mode(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    eager = _block_keeps(is_compiled=False)
    monkeypatch.setattr("recipes.plan.compiled._BACKEND", "none")
    monkeypatch.setattr("recipes.plan.compiled._shares", {})
    monkeypatch.setattr(logging.getLogger("lightning_recipes"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="lightning_recipes"):
        assert _block_keeps(is_compiled=True) == eager
    (line,) = [record.message for record in caplog.records if "eager mode" in record.message]
    assert "'none'" in line


def test_a_compiled_plan_asks_nothing_of_a_recomputed_block() -> None:
    kept = {
        compiled: make_plan(
            resolved(composed_config("mode=plan", *COMMON, *GPT, "activation_checkpoint=full", f"compile={compiled}")),
            cpu_cluster(1),
            rates=None,
        )
        for compiled in ("true", "false")
    }
    of_compiled, of_eager = (
        max(moment.held.get(ACTIVATIONS, 0) for moment in kept[name].moments) for name in ("true", "false")
    )
    assert of_compiled == of_eager
