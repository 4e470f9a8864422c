"""The places of a model add up to the step that they were recorded in."""

import pytest
import torch
from plan_cases import DEEP
from plan_steps import step_of
from torch import nn

from recipes.mesh import Mesh
from recipes.plan.hardware import find_cluster
from recipes.plan.memory import timeline
from recipes.plan.places import Places, count_parameters, describe_places, with_seconds
from recipes.plan.roofline import Seconds, StepSeconds
from recipes.plan.step import record_step
from recipes.plan.trace import KEPT, Op

SIZES = ["strategy=fsdp", "tensor_parallel_size=2", "trainer.devices=2"]


@pytest.fixture(scope="module")
def recorded() -> tuple[list[Op], Places, nn.Module]:
    step = step_of([*DEEP, *SIZES], 2)
    with torch.device("meta"):
        model = step.make_model()
    ops = record_step(step)
    return ops, describe_places(ops, model), model


def test_what_is_kept_is_what_the_backward_pass_begins_with(recorded: tuple[list[Op], Places, nn.Module]) -> None:
    ops, places, _ = recorded
    held = next(moment.held for moment in timeline(ops) if moment.section == "backward/head")
    kept = sum(times * place.kept_bytes for times, place in places.parts())
    assert kept == pytest.approx(sum(held.get(name, 0) for name in KEPT), rel=0.01)


def test_a_tied_weight_is_before_and_after_the_blocks(recorded: tuple[list[Op], Places, nn.Module]) -> None:
    before, within, after = count_parameters(recorded[2])
    total = sum(parameter.numel() for parameter in recorded[2].parameters())
    embedding = 2048 * 128
    assert before + within + after == total + embedding


def test_a_block_sends_what_its_matrices_need(recorded: tuple[list[Op], Places, nn.Module]) -> None:
    """Two gathers and two sums each way of [8, 128, 128] in float32, half of which comes from the other rank."""
    cluster = find_cluster("h100x2", per_node=None, num_nodes=1, interconnect=None, memory_gib=None)
    sent, seconds = recorded[1].block.sent(cluster, Mesh(tensor=2))["tensor"]
    assert sent == pytest.approx(8 * 8 * 128 * 128 * 4 / 2, rel=0.01)
    assert seconds > sent / (450e9 * 0.75)


def test_seconds_of_blocks_are_those_of_the_mean_block(recorded: tuple[list[Op], Places, nn.Module]) -> None:
    sections = {f"{way}/block {index}": Seconds(matmul=index) for way in ("forward", "backward") for index in range(12)}
    timed = with_seconds(recorded[1], StepSeconds(sections=sections | {"forward/head": Seconds(memory=3.0)}))
    assert timed.block.forward.total == pytest.approx(5.5)
    assert timed.last.forward.total == 3.0
