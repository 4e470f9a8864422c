"""What each way to keep activations does to a planned step."""

from typing import Any

import pytest
from support import composed_config, resolved

from recipes.plan.activations import PCIE_BYTES_PER_SECOND, keep_budget, time_transfers
from recipes.plan.hardware import find_cluster
from recipes.plan.plan import Plan, make_plan
from recipes.plan.roofline import Rates, Seconds, StepSeconds
from recipes.plan.table import describe_memory
from recipes.plan.times import Times
from recipes.plan.trace import ACTIVATIONS, OFFLOADED, TEMPORARY, Cost, Op

RUN = ["mode=plan", "data=random_tokens", "recipe=single_bf16", "model=gpt2", "global_batch_size=16"]
RATES = Rates(tflops={"bf16": 1000.0, "fp32": 500.0}, bandwidth=3e12, matmul=0.7, attention=(0.4, 0.3))


def _plan(*overrides: str, compiled: bool = False) -> Plan:
    cluster = find_cluster("h100", per_node=1, num_nodes=1, interconnect=None, memory_gib=None)
    return make_plan(
        resolved(composed_config(*RUN, *overrides, f"compile={str(compiled).lower()}")), cluster, rates=RATES
    )


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    options = ["none", "full", "every_nth", "selective", "offload"]
    return {option: _plan(f"activation_checkpoint={option}") for option in options}


def _kept(plan: Plan) -> int:
    return max(moment.held.get(ACTIVATIONS, 0) for moment in plan.moments)


def _seconds(plan: Plan) -> float:
    return _times(plan).step_seconds


def _times(plan: Plan) -> Times:
    assert plan.times is not None
    return plan.times


def test_what_keeps_less_takes_longer(plans: dict[str, Plan]) -> None:
    order = ["none", "selective", "every_nth", "full"]
    kept = [_kept(plans[option]) for option in order]
    assert kept == sorted(kept, reverse=True)
    assert _seconds(plans["none"]) < _seconds(plans["selective"]) < _seconds(plans["full"])


def test_selective_repeats_no_product(plans: dict[str, Plan]) -> None:
    for part in ("matmul", "attention"):
        plain, selective = (getattr(_times(plans[name]).step.of("backward/"), part) for name in ("none", "selective"))
        assert selective == pytest.approx(plain)
    memory = [_times(plans[name]).step.of("backward/").memory for name in ("none", "selective")]
    assert memory[1] > memory[0]


def test_offloaded_activations_are_in_host_memory(plans: dict[str, Plan]) -> None:
    plain, offloaded = plans["none"], plans["offload"]
    left = _kept(plain) - _kept(offloaded)
    assert left > 0.8 * _kept(plain)  # of 12 blocks, 11
    assert OFFLOADED not in offloaded.peak.held
    # with the copies of the weights that autocast makes, which blocks save too
    assert offloaded.host[OFFLOADED] >= left
    transfer = _times(offloaded).transfer
    assert transfer is not None
    assert transfer.num_bytes == 2 * offloaded.host[OFFLOADED]
    assert transfer.seconds == transfer.num_bytes / PCIE_BYTES_PER_SECOND
    assert _seconds(offloaded) > _seconds(plain) + 0.99 * transfer.exposed_seconds
    assert _times(plain).transfer is None


def test_a_budget_of_nothing_keeps_what_every_block_keeps(plans: dict[str, Plan]) -> None:
    option = "activation_checkpoint=memory_budget"
    none, half, whole = (
        _plan(option, f"activation_checkpoint.memory_budget={fraction}", compiled=True) for fraction in (0.0, 0.5, 1.0)
    )
    assert none.peak.total == pytest.approx(_plan("activation_checkpoint=full", compiled=True).peak.total, rel=0.001)
    assert whole.peak.total == _plan(compiled=True).peak.total < plans["none"].peak.total
    middle = (none.peak.total + whole.peak.total) / 2
    assert half.peak.total == pytest.approx(middle, rel=0.001)
    assert _seconds(whole) < _seconds(half) < _seconds(none)
    assert any("assumed" in line and "50%" in line for line in describe_memory(half))


def _op(section: str, **more: Any) -> Op:
    return Op(name="aten::mul", section=section, **{"cost": Cost("memory"), "allocated": {}, "freed": {}} | more)


def test_a_budget_moves_bytes_and_loses_none() -> None:
    ops = [
        _op("forward/block 0", allocated={ACTIVATIONS: 100}),
        _op("forward/block 0", allocated={ACTIVATIONS: 10}),  # its output
        _op("backward/block 0", freed={ACTIVATIONS: 110}),
    ]
    changed = keep_budget(ops, 0.25)
    assert changed[0].allocated == {ACTIVATIONS: 25, TEMPORARY: 75}
    assert changed[1].freed == {TEMPORARY: 75}
    assert changed[2].allocated == {ACTIVATIONS: 75}
    for name in (ACTIVATIONS, TEMPORARY):
        assert sum(op.allocated.get(name, 0) for op in changed) == sum(op.freed.get(name, 0) for op in changed)


def test_a_transfer_is_hidden_by_all_blocks_but_the_first() -> None:
    cost = Cost("transfer", num_bytes=PCIE_BYTES_PER_SECOND)  # a second
    ops = [_op("forward/block 0", cost=cost), _op("backward/block 1", cost=cost)]
    names = ("embedding", "block 0", "block 1", "head")
    sections = {f"{direction}/{name}": Seconds(matmul=0.75) for direction in ("forward", "backward") for name in names}
    found = time_transfers(ops, StepSeconds(sections=sections))
    assert found is not None
    assert (found.num_bytes, found.seconds, found.exposed_seconds) == (2 * PCIE_BYTES_PER_SECOND, 2.0, 0.5)
