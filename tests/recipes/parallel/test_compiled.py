"""Compiled blocks of a divided model: the gradients of eager ones, and none is lost."""

import pytest
import torch
from mesh_models import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    gradient_differences,
    gradients_of,
    make_batch,
    make_model,
    run_backward,
)
from thread_ranks import run_on_threads
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from recipes.mesh import Mesh


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("gpt2", Mesh(tensor=2)), ("llama", Mesh(tensor=2)), ("llama", Mesh(context=2))],
    ids=lambda value: value if isinstance(value, str) else str(value.sizes()),
)
def test_every_gradient_of_compiled_blocks_is_that_of_one_device(name: str, mesh: Mesh) -> None:
    """Torch's compiler loses the gradient of an input that is still on its way: that of the embedding."""
    torch._dynamo.reset()
    batch, one = make_batch(), make_model(name)
    expected_loss = run_backward(one, batch)
    expected = gradients_of(one)

    def work(rank: int) -> tuple[float, dict[str, float]]:
        model = make_model(name, mesh)
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        loss = run_backward(model, batch, mesh, rank=rank)
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.to_local().any()
        return float(loss), dict(gradient_differences(model, expected))

    of_ranks = run_on_threads(work, num_ranks=2)
    total = of_ranks[0][0] if mesh.tensor > 1 else of_ranks[0][0] + of_ranks[1][0]
    assert total == pytest.approx(float(expected_loss), rel=LOSS_TOLERANCE)
    for _, differences in of_ranks:
        assert max(differences.values()) < GRADIENT_TOLERANCE, differences


def test_every_gradient_of_compiled_blocks_with_divided_experts_is_that_of_one_device() -> None:
    """The exchange of rows is no part of the graph: each step has another number of them."""
    torch._dynamo.reset()
    mesh = Mesh(shard=2, expert=2)
    batches = [make_batch(), make_batch(packed=True)]
    one = make_model("experts")
    expected_losses = [float(run_backward(one, batch)) for batch in batches]
    expected = gradients_of(one)

    def work(rank: int) -> tuple[list[float], dict[str, float]]:
        model = make_model("experts", mesh)
        for block in model.blocks:
            block.compile(backend="aot_eager", dynamic=False)
        losses = [float(run_backward(model, batch, mesh, rank=rank)) for batch in batches]
        return losses, dict(gradient_differences(model, expected))

    of_ranks = run_on_threads(work, num_ranks=2)
    totals = [sum(losses) for losses in zip(*(losses for losses, _ in of_ranks), strict=True)]
    assert totals == pytest.approx(expected_losses, rel=LOSS_TOLERANCE)
    for _, differences in of_ranks:
        assert max(differences.values()) < GRADIENT_TOLERANCE, differences


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_no_block_takes_what_is_still_on_its_way(sequence_parallel: bool) -> None:
    def work(rank: int) -> list[str]:
        mesh, found = Mesh(tensor=2, sequence_parallel=sequence_parallel), []
        model = make_model("llama", mesh)
        for module in model.modules():
            module.register_forward_pre_hook(
                lambda module, args: found.extend(
                    type(x).__name__ for x in args if isinstance(x, AsyncCollectiveTensor)
                )
            )
        run_backward(model, make_batch(), mesh, rank=rank)
        return found

    assert run_on_threads(work, num_ranks=2) == [[], []]
