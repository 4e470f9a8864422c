"""The mesh of a composed config: what each size defaults to, under each strategy and on several nodes."""

import functools
import itertools
from typing import Any

import pytest
import yaml
from support import composed_config, resolved

from recipes.errors import ConfigError
from recipes.mesh import Mesh
from recipes.runtime.world import Ranks

_SIZES = (
    *("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
    *("data_parallel_replicate", "data_parallel_shard"),
)


def config_of(strategy: str, **settings: Any) -> dict[str, Any]:
    """Return what a mesh depends on."""
    return _compose(strategy) | settings


@functools.cache
def _compose(strategy: str) -> dict[str, Any]:
    config = composed_config(f"strategy={strategy}")
    return {key: config[key] for key in ("strategy", "sequence_parallel", "pipeline_schedule", *_SIZES)}


def make_mesh(config: dict[str, Any], ranks: Ranks) -> Mesh:
    return resolved(config).on(ranks).mesh


def mesh_of(strategy: str, *, num_nodes: int = 1, per_node: int = 8, **sizes: Any) -> Mesh:
    return make_mesh(config_of(strategy, **sizes), Ranks(per_node=per_node, num_nodes=num_nodes, started_by=None))


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", Mesh(replicate=16)),
        ("deepspeed_stage_1", Mesh(shard=16)),
        ("deepspeed_stage_3", Mesh(shard=16)),
        ("fsdp", Mesh(shard=16)),
        ("hsdp", Mesh(replicate=2, shard=8)),
    ],
)
def test_without_sizes_every_rank_of_two_nodes_has_samples_of_its_own(strategy: str, expected: Mesh) -> None:
    assert mesh_of(strategy, num_nodes=2) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor_parallel_size": 4}, Mesh(replicate=2, shard=2, tensor=4)),
        ({"tensor_parallel_size": 8}, Mesh(replicate=2, shard=1, tensor=8)),
        ({"context_parallel_size": 2}, Mesh(replicate=2, shard=4, context=2)),
        ({"tensor_parallel_size": 2, "context_parallel_size": 2}, Mesh(replicate=2, shard=2, context=2, tensor=2)),
        # more ranks than a node has work on the same samples
        ({"context_parallel_size": 16}, Mesh(context=16)),
        ({"tensor_parallel_size": 4, "data_parallel_shard": 4}, Mesh(shard=4, tensor=4)),
        ({"data_parallel_replicate": 8}, Mesh(replicate=8, shard=2)),
    ],
    ids=str,
)
def test_hsdp_shards_over_the_ranks_of_a_node_that_the_model_leaves(sizes: dict[str, int], expected: Mesh) -> None:
    assert mesh_of("hsdp", num_nodes=2, **sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data_parallel_replicate": 2}, Mesh(replicate=2, shard=4)),
        ({"data_parallel_shard": 2}, Mesh(replicate=4, shard=2)),
        ({"data_parallel_shard": 2, "data_parallel_replicate": 4}, Mesh(replicate=4, shard=2)),
        ({"data_parallel_replicate": 1}, Mesh(shard=8)),
        ({"data_parallel_shard": 1}, Mesh(replicate=8)),
        ({"tensor_parallel_size": 2, "sequence_parallel": False}, Mesh(shard=4, tensor=2, sequence_parallel=False)),
    ],
    ids=str,
)
def test_fsdp_takes_copies_or_shards_or_both(sizes: dict[str, Any], expected: Mesh) -> None:
    assert mesh_of("fsdp", **sizes) == expected


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_2", "fsdp"])
def test_ranks_that_divide_a_sequence_have_the_same_samples_under_every_strategy(strategy: str) -> None:
    mesh = mesh_of(strategy, context_parallel_size=4)
    assert (mesh.data_size, mesh.context, mesh.world_size) == (2, 4, 8)


@pytest.mark.parametrize("num_ranks", [1, 6, 8])
def test_every_pair_of_sizes_is_a_mesh_of_all_ranks_or_a_mistake_whose_fix_is_one(num_ranks: int) -> None:
    ranks = Ranks(per_node=num_ranks, num_nodes=1, started_by=None)
    typed = [None, *range(1, num_ranks + 2), 100]
    for replicate, shard in itertools.product(typed, typed):
        config = config_of("fsdp") | {"data_parallel_replicate": replicate, "data_parallel_shard": shard}
        try:
            mesh = make_mesh(config, ranks)
        except ConfigError as mistake:
            assert (replicate or 1) * (shard or 1) != num_ranks
            fixed = dict(text.split("=") for text in mistake.fix.split())
            mesh = make_mesh(config | {name: yaml.safe_load(value) for name, value in fixed.items()}, ranks)
        assert mesh.world_size == num_ranks


def test_a_mode_that_takes_no_steps_has_one_rank() -> None:
    config = config_of("fsdp", tensor_parallel_size=2, mode={"_target_": "recipes.mode.sample.sample"})
    run = resolved(config | {"trainer": {"devices": 4, "num_nodes": 1, "accelerator": "cpu"}})
    assert run.mesh == Mesh()
    assert run.with_settings({"mode._target_": "recipes.mode.fit.fit"}).mesh == Mesh(shard=2, tensor=2)


@pytest.mark.parametrize(
    ("sizes", "expected"), [({}, 8), ({"tensor_parallel_size": 2}, 4), ({"context_parallel_size": 8}, 1)]
)
def test_ranks_with_other_samples_are_counted_before_a_mesh_is_made(sizes: dict[str, int], expected: int) -> None:
    assert _count_data_ranks(**sizes) == expected


def test_sizes_that_do_not_divide_still_leave_a_number_to_check_the_batch_against() -> None:
    assert _count_data_ranks(tensor_parallel_size=3) == 2
    assert _count_data_ranks(tensor_parallel_size=16) == 1


def _count_data_ranks(**sizes: int) -> int:
    return resolved(config_of("fsdp", **sizes)).on(Ranks(per_node=8, num_nodes=1, started_by=None)).num_data_ranks
