"""The advice holds: the advised run stays below the limit on real ranks, and the next larger micro-batch does not."""

from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import COMMON, GPT, PEAK_RANKS
from ranks import run_on_ranks

from recipes.config import compose_and_check
from recipes.config.resolved import ResolvedRun
from recipes.plan.advice import Planner, _ladder, find_settings, measures, with_overrides
from recipes.plan.hardware import Cluster, find_cluster

RUN = [*COMMON, *GPT, "global_batch_size=32"]


def _cluster(mib: float, *, num_ranks: int = 1) -> Cluster:
    return find_cluster("auto", per_node=num_ranks, num_nodes=1, interconnect=None, memory_gib=mib / 1024)


def _compose(*overrides: str) -> ResolvedRun:
    composed, mistakes = compose_and_check([*RUN, *overrides])
    assert composed is not None
    assert not mistakes, mistakes
    return composed


def _advise(mib: float, *, num_ranks: int = 1) -> list[str]:
    advice = find_settings(_compose(), Planner(_cluster(mib, num_ranks=num_ranks)))
    assert advice is not None
    return advice.overrides


def test_the_advised_micro_batch_fits_and_the_next_larger_one_does_not(tmp_path: Path) -> None:
    limit = 150
    overrides = _advise(limit)
    assert overrides == ["strategy=single", "activation_checkpoint=none", "micro_batch_size=8"]
    cases = {
        str(size): {"overrides": [*RUN, *overrides[:-1], f"micro_batch_size={size}", "trainer.devices=1"]}
        for size in (8, 16)
    }
    results = run_on_ranks(cases, world_size=1, folder=tmp_path, worker=PEAK_RANKS)
    peaks = {name: result["peak_bytes"] / 2**20 for name, result in results.items()}
    assert peaks["8"] <= limit < peaks["16"]


def test_blocks_are_recomputed_before_the_state_is_sharded_further() -> None:
    assert _advise(68)[:2] == ["strategy=single", "activation_checkpoint=selective"]
    assert _advise(65)[:2] == ["strategy=single", "activation_checkpoint=full"]
    # of two ranks: ddp holds 62.7 MiB at least, ZeRO-1 58.5, FSDP2 45.7
    assert _advise(60, num_ranks=2)[0] == "strategy=deepspeed_stage_1"
    assert _advise(48, num_ranks=2)[0] == "strategy=fsdp"


def test_what_cannot_fit_gets_no_advice_but_what_each_measure_saves() -> None:
    composed, planner = _compose(), Planner(_cluster(20))
    assert find_settings(composed, planner) is None
    lines = list(measures(composed, planner))
    assert [line.split()[0] for line in lines][:4] == [
        "micro_batch_size=16",
        "precision=bf16-mixed",
        "activation_checkpoint=selective",
        "activation_checkpoint=full",
    ]


@pytest.mark.parametrize("override", ["trainer.accumulate_grad_batches=2", "micro_batch_size=2"])
def test_settings_of_the_batch_are_replaced(override: str) -> None:
    advice = find_settings(_compose(override), Planner(_cluster(150)))
    assert advice is not None
    assert advice.overrides[-1] == "micro_batch_size=8"


def test_on_several_nodes_shards_of_a_node_come_before_shards_of_all() -> None:
    one = find_cluster("h100x8", per_node=None, num_nodes=1, interconnect=None, memory_gib=None)
    four = find_cluster("h100x8", per_node=None, num_nodes=4, interconnect=None, memory_gib=None)
    assert [strategy[0] for strategy in _ladder(one)].count("strategy=hsdp") == 0
    names = [strategy[0] for strategy in _ladder(four)]
    assert names.index("strategy=deepspeed_stage_1") < names.index("strategy=hsdp") < names.index("strategy=fsdp")


def test_other_settings_keep_the_steps_that_the_epochs_were_counted_as() -> None:
    """A plan with `plan.search=true` once said that it takes a billion steps."""
    typed = _compose("trainer.max_steps=3epochs")
    assert typed.epochs == "3"
    counted = replace(typed.with_settings(dict.fromkeys(typed.list_followers("trainer.max_steps"), 420)), epochs=None)
    changed = with_overrides(counted, ["strategy=ddp"])
    assert changed is not None
    assert (changed.epochs, changed.max_steps) == (None, 420)
    assert changed.config["scheduler"]["num_steps"] == 420
