"""The order of rows and its inverse, and the boxes of shards: which elements of an unsharded tensor a rank holds."""

import itertools
import random

import pytest
import torch
from thread_ranks import run_on_threads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from recipes.parallel.placement import RowOrder, cut_box, find_box, find_row_orders

ORDERS = [
    RowOrder(sizes=(8, 8, 8), num_ranks=2),
    RowOrder(sizes=(8, 8, 8), num_ranks=4),
    RowOrder(sizes=(16, 4, 4), num_ranks=4),
    RowOrder(sizes=(6, 3, 3), num_ranks=3),
    RowOrder(sizes=(5,), num_ranks=1),
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_each_rank_holds_its_share_of_each_part_in_the_order_of_parts(order: RowOrder) -> None:
    rows = torch.arange(sum(order.sizes))
    parts = [part.chunk(order.num_ranks) for part in rows.split(order.sizes)]
    expected = torch.cat([part[rank] for rank in range(order.num_ranks) for part in parts])
    assert torch.equal(order.to_ranks(rows), expected)
    assert torch.equal(order.to_ranks(rows[:, None].expand(-1, 3)), expected[:, None].expand(-1, 3))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_finding_is_the_inverse_for_every_range_of_rows(order: RowOrder) -> None:
    rows = torch.arange(sum(order.sizes))
    of_ranks = order.to_ranks(rows)
    for start, stop in itertools.combinations_with_replacement(range(len(rows) + 1), 2):
        pieces = list(order.find(start, stop - start))
        found = torch.cat([rows[first : first + count] for first, count in pieces] or [rows[:0]])
        assert torch.equal(found, of_ranks[start:stop])
        assert all(count > 0 for _, count in pieces)


def test_an_order_belongs_to_all_parameters_of_a_layer_and_to_no_others() -> None:
    model = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 2))
    order = RowOrder(sizes=(2, 2, 2), num_ranks=2)
    model[0].row_order = order  # type: ignore[assignment]
    model[0].weight = nn.Parameter(torch.zeros(6, 2))  # as engines do
    assert find_row_orders(model) == {id(model[0].weight): order, id(model[0].bias): order}


def test_a_box_is_what_narrow_gives_and_an_empty_one_may_start_at_the_end() -> None:
    values = torch.arange(60).reshape(5, 4, 3)
    assert torch.equal(cut_box(values, (1, 0, 2), (3, 4, 1)), values[1:4, :, 2:3])
    assert cut_box(values, (5, 0, 0), (0, 4, 3)).shape == (0, 4, 3)
    assert cut_box(values, (9, 0, 0), (0, 4, 3)).shape == (0, 4, 3)
    assert cut_box(torch.tensor(7.0), (), ()) == 7.0
    cut_box(values, (0, 0, 0), (1, 1, 1)).fill_(-1)
    assert values[0, 0, 0] == -1, "it is a view"


# rows that do not divide, fewer rows than ranks, none along a dimension of size 1
SHAPES = [(8, 6), (7, 5), (3, 2), (1, 4), (2, 9), (5,)]
PLACEMENTS: list[list[Placement]] = [
    [Shard(0), Replicate()],
    [Replicate(), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Replicate()],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
]


def test_the_box_of_a_shard_holds_its_elements_for_even_and_uneven_rows() -> None:
    def work(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2, 2))
        num_checked = 0
        for shape, placements in itertools.product(SHAPES, PLACEMENTS):
            if any(placement.is_shard(1) for placement in placements) and len(shape) == 1:
                continue
            whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            tensor = distribute_tensor(whole, mesh, placements)
            num_checked += _holds_its_box(tensor, whole)
        return num_checked

    assert run_on_threads(work) == [4 + 5 * 6] * 4


def _holds_its_box(tensor: Tensor, whole: Tensor) -> bool:
    assert isinstance(tensor, DTensor)
    offsets, shape = find_box(tensor)
    local = tensor.to_local().detach()
    assert local.shape == shape
    assert torch.equal(cut_box(whole, offsets, shape), local), (whole.shape, tensor.placements, offsets, shape)
    return True


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 2), (3, 2), (2, 4)], ids=str)
def test_the_box_of_rows_that_tensor_parallelism_and_then_fsdp_have_cut(mesh_shape: tuple[int, int]) -> None:
    """A strided shard: the rows of a data rank are not next to each other in the unsharded tensor."""
    rng = random.Random(0)
    shapes = [(rng.randint(1, 5) * mesh_shape[1], rng.randint(1, 4) * mesh_shape[1]) for _ in range(6)]

    def work(rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("shard", "tensor"))
        boxes = []
        for shape in shapes:
            whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            for placement in (Shard(0), Shard(1), Replicate()):
                module = nn.Linear(1, 1, bias=False)
                module.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [placement]))
                fully_shard(module, mesh=mesh["shard"])
                assert _holds_its_box(module.weight, whole)
                boxes.append(find_box(module.weight))  # type: ignore[arg-type]
        return boxes

    of_ranks = run_on_threads(work, num_ranks=mesh_shape[0] * mesh_shape[1])
    for index, (shape, placement) in enumerate(itertools.product(shapes, ("rows", "columns", "whole"))):
        covered = torch.zeros(shape, dtype=torch.int64)
        for boxes in of_ranks:
            cut_box(covered, *boxes[index]).add_(1)
        # each element is on one rank; what is whole is on each rank of a tensor group
        assert (covered == (mesh_shape[1] if placement == "whole" else 1)).all(), (shape, placement)
