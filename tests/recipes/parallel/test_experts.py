"""Ranks that divide experts: loss and every gradient are those of one device, however uneven the loads are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.mesh import Mesh
from recipes.model.moe.llama import Experts
from recipes.numerics.grouped_linear import GroupedLinear
from recipes.parallel.experts import ExpertRanks
from recipes.parallel.placement import cut_box, find_box

MESHES = [
    Mesh(shard=2, expert=2),
    Mesh(shard=4, expert=2),
    Mesh(shard=4, expert=4),
    Mesh(replicate=2, shard=2, expert=2),
    Mesh(shard=2, context=2, expert=4),
    Mesh(shard=1, context=2, expert=2),
]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.sizes()))
def test_loss_and_gradients_are_those_of_one_device(mesh: Mesh) -> None:
    batch, one = make_batch(), make_model("experts")
    expected_loss = run_backward(one, batch)
    expected = gradients_of(one)

    def work(rank: int) -> tuple[float, dict[str, float]]:
        model = make_model("experts", mesh)
        loss = run_backward(model, batch, mesh, rank=rank)
        return float(loss), dict(gradient_differences(model, expected))

    of_ranks = run_on_threads(work, num_ranks=mesh.world_size)
    assert sum(loss for loss, _ in of_ranks) == pytest.approx(float(expected_loss), rel=LOSS_TOLERANCE)
    for _, differences in of_ranks:
        assert max(differences.values()) < GRADIENT_TOLERANCE, differences


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.sizes()))
def test_a_rank_has_its_experts_and_its_share_of_their_rows(mesh: Mesh) -> None:
    """Of 4 experts of 48 rows; every element is on as many ranks as there are replicas."""

    def work(rank: int) -> list[tuple[Any, Any]]:
        model = make_model("experts", mesh)
        gates = [part.gate.weight for part in model.modules() if isinstance(part, Experts)]
        assert all(isinstance(gate, DTensor) for gate in gates)
        return [find_box(gate) for gate in gates]

    boxes = [boxes[0] for boxes in run_on_threads(work, num_ranks=mesh.world_size)]
    shape = (4 // mesh.expert, 48 // mesh.expert_shard, 32)
    assert {found for _, found in boxes} == {shape}
    for rank, (offsets, _) in enumerate(boxes):
        own = rank % (mesh.shard * mesh.context)
        first, second = own % mesh.expert, own // mesh.expert
        assert offsets == (first * shape[0], second * shape[1], 0)


@pytest.mark.parametrize("mesh", MESHES[:4], ids=lambda mesh: str(mesh.sizes()))
def test_first_weights_are_bit_for_bit_those_of_one_device(mesh: Mesh) -> None:
    whole = dict(make_model("experts", initialize=lambda model: model.init_weights(7)).named_parameters())

    def work(rank: int) -> list[str]:
        model = make_model("experts", mesh, initialize=lambda part: part.init_weights(7))
        own = dict(model.named_parameters())
        assert own.keys() == whole.keys()
        return [
            name
            for name, parameter in own.items()
            if not torch.equal(parameter.to_local(), cut_box(whole[name], *find_box(parameter)))
        ]

    assert run_on_threads(work, num_ranks=mesh.world_size) == [[]] * mesh.world_size


W, F = 8, 16
# rows of each of two ranks for each of four experts
LOADS = {
    "even": [[2, 2, 2, 2], [2, 2, 2, 2]],
    "uneven": [[5, 0, 1, 2], [0, 0, 7, 1]],
    "all on one rank": [[3, 5, 0, 0], [8, 0, 0, 0]],
    "one sends nothing": [[0, 0, 0, 0], [1, 2, 3, 2]],
}


def _make_experts() -> Experts:
    experts = Experts(4, hidden_size=W, ffn_hidden_size=F)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return experts


def _draw(load: list[int], rank: int) -> tuple[Tensor, Tensor]:
    """Return rows by expert, and what their results are weighted with."""
    generator = torch.Generator().manual_seed(rank + 1)
    rows, weight = torch.randn(2, sum(load), W, generator=generator).unbind()
    return rows.clone().requires_grad_(), weight


class _Part(Experts):
    """The experts of one rank, as plain tensors."""

    def __init__(self, rank: int) -> None:
        super().__init__(2, hidden_size=W, ffn_hidden_size=F)
        whole = _make_experts()
        for own, all_of in zip(self.parameters(), whole.parameters(), strict=True):
            own.data.copy_(all_of.data[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOADS)
def test_rows_go_to_their_experts_and_come_back_whatever_the_loads(name: str, precision: torch.dtype) -> None:
    """To the last digit, in which a vectorized exponential differs from that of what is left of a tensor."""
    loads = LOADS[name]

    def work(rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        experts, (rows, weight) = _Part(rank), _draw(loads[rank], rank)
        experts.expert_ranks = ExpertRanks(dist.group.WORLD)  # type: ignore[arg-type]
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            out = experts(rows, torch.tensor(loads[rank]))
        (out.float() * weight).sum().backward()
        assert rows.grad is not None
        return out.detach(), rows.grad, [parameter.grad for parameter in experts.parameters()]  # type: ignore[misc]

    of_ranks = run_on_threads(work, num_ranks=2)
    whole = _make_experts()
    drawn = [_draw(load, rank) for rank, load in enumerate(loads)]
    # all rows by expert, those of the first rank first
    parts = [(rows.split(load), weight.split(load)) for (rows, weight), load in zip(drawn, loads, strict=True)]
    together = torch.cat([part[0][expert] for expert in range(4) for part in parts])
    weights = torch.cat([part[1][expert] for expert in range(4) for part in parts])
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        out = whole(together, torch.tensor(loads).sum(dim=0))
    (out.float() * weights).sum().backward()
    sizes = [load[expert] for expert in range(4) for load in loads]
    for rank, (found, grad, of_weights) in enumerate(of_ranks):
        _check(found, torch.cat(out.detach().split(sizes)[rank::2]))
        _check(grad, drawn[rank][0].grad)
        for part, all_of in zip(of_weights, whole.parameters(), strict=True):
            assert all_of.grad is not None
            _check(part, all_of.grad[2 * rank : 2 * rank + 2])


def _check(found: Tensor, expected: Tensor | None) -> None:
    assert expected is not None
    assert found.shape == expected.shape
    largest = (found - expected).abs().max() if len(found) else torch.zeros(())
    assert largest <= (2**-8 if found.dtype == torch.bfloat16 else 1e-6) * (expected.abs().max() if len(found) else 1)


def test_the_experts_of_one_device_are_plain_layers() -> None:
    model = make_model("experts")
    assert [type(part) for part in model.modules() if isinstance(part, GroupedLinear)] == [GroupedLinear] * 6
