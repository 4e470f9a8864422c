"""The fastest meshes fit, divide what they split, and can be typed."""

import os
import time

import pytest

from recipes.config import compose_and_check
from recipes.config.resolved import ResolvedRun
from recipes.plan.advice import with_overrides
from recipes.plan.hardware import find_cluster
from recipes.plan.plan import get_limit, make_plan
from recipes.plan.roofline import get_rates
from recipes.plan.search import Found, describe_search, list_layouts, search_layouts

RATES = get_rates("NVIDIA H100 80GB HBM3", tflops={"bf16": 989.4, "fp16": 989.4, "fp32": 67.0}, bandwidth=3350e9)
NUM_DEVICES = 1024 if "LONG_TESTS" in os.environ else 128  # set by `make test-long`
CLUSTER = find_cluster(f"h100x{NUM_DEVICES}", per_node=None, num_nodes=1, interconnect=None, memory_gib=None)


def _compose(*overrides: str) -> ResolvedRun:
    composed, mistakes = compose_and_check(
        ["mode=plan", "data=random_tokens", "recipe=fsdp_bf16", "model=llama_8b", "global_batch_size=2048", *overrides]
    )
    assert composed is not None
    assert not mistakes, mistakes
    return composed


@pytest.fixture(scope="module")
def searched() -> tuple[list[Found], Found, float]:
    began = time.process_time()
    limit = get_limit(CLUSTER)
    found, smallest = search_layouts(_compose(), CLUSTER, RATES, limit_bytes=limit, peak_tflops=989.4)
    return found, smallest, time.process_time() - began


@pytest.mark.slow
def test_a_thousand_devices_are_searched_within_a_minute(searched: tuple[list[Found], Found, float]) -> None:
    assert searched[2] < 60


def test_what_is_found_fits_and_is_sorted(searched: tuple[list[Found], Found, float]) -> None:
    found, smallest, _ = searched
    assert len(found) > 10
    seconds = [each.estimate.step_seconds for each in found]
    assert seconds == sorted(seconds)
    assert all(each.estimate.peak_bytes <= get_limit(CLUSTER) for each in found)
    assert smallest.estimate.peak_bytes <= min(each.estimate.peak_bytes for each in found)
    assert all(each.mfu is not None and 0 < each.mfu < 0.7 for each in found)


def test_the_first_can_be_typed_and_holds_when_it_is_recorded(searched: tuple[list[Found], Found, float]) -> None:
    first = searched[0][0]
    run = with_overrides(_compose(), first.overrides())
    assert run is not None
    plan = make_plan(run, CLUSTER, rates=RATES)
    assert plan.fits
    assert plan.times is not None
    assert plan.times.step_seconds == pytest.approx(first.estimate.step_seconds, rel=0.1)
    assert plan.peak.total == pytest.approx(first.estimate.peak_bytes, rel=0.1)


def test_the_table_has_ten_rows_and_what_to_type(searched: tuple[list[Found], Found, float]) -> None:
    found, smallest, _ = searched
    lines = list(describe_search(found, smallest, limit_bytes=1.0))
    assert len(lines) == 1 + 1 + 10 + 1
    assert lines[-1] == "search: " + " ".join(found[0].overrides())
    [first, second] = list(describe_search([], smallest, limit_bytes=2.0**30))
    assert "nothing fits into 1.0 GiB" in first
    assert "strategy=fsdp" in second


def test_sizes_divide_heads_layers_sequences_and_the_batch() -> None:
    composed = _compose("model.num_layers=4", "global_batch_size=256")
    layouts = list(list_layouts(composed, composed, CLUSTER))
    assert layouts
    for layout in layouts:
        mesh, stages = layout.mesh, layout.pipeline.num_stages
        assert mesh.world_size * stages == NUM_DEVICES
        assert 8 % mesh.tensor == 0  # key-value heads, and the devices of a node
        assert 32 // mesh.tensor % mesh.context == 0
        assert stages <= 4
        assert mesh.data_size * layout.micro_batch_size * layout.num_micro_batches == 256


def test_a_model_that_cannot_be_divided_has_samples_divided_alone() -> None:
    composed, _ = compose_and_check(
        ["mode=plan", "recipe=fsdp_bf16", "model=resnet18", "data=digits", "metrics=classification"]
    )
    assert composed is not None
    cluster = find_cluster("h100x8", per_node=None, num_nodes=1, interconnect=None, memory_gib=None)
    layouts = list(list_layouts(composed, composed, cluster))
    assert layouts
    assert all((each.mesh.model_size, each.pipeline.num_stages) == (1, 1) for each in layouts)
