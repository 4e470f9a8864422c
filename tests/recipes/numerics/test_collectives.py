"""Each collective is what its definition says, and its gradient that of the same computation on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_ranks import run_on_threads
from torch import Tensor

from recipes.numerics import collectives
from recipes.numerics.collectives import (
    CopyToRanks,
    ExchangeParts,
    ExchangeRows,
    GatherParts,
    JoinColumns,
    ReduceFromRanks,
    ScatterSum,
    average_over_ranks,
    gather_rows,
    reduce_parts,
    sum_over_ranks,
)

SHAPE = (4, 8, 4)  # of what a rank has; four ranks divide each dimension


@dataclass(frozen=True)
class Case:
    """A collective, and the same on one device.

    Attributes:
        apply: Of this rank's tensor and the group.
        on_one: Of the tensors of all ranks: what each of them gets.
        is_shared: Every rank uses the result in the same way: one use, and not one a rank, has a gradient.
    """

    apply: Callable[[Any, Any], Tensor]
    on_one: Callable[[list[Tensor]], list[Tensor]]
    is_shared: bool = False


def _exchange(parts: list[Tensor], split: int, concat: int) -> list[Tensor]:
    pieces = [part.chunk(len(parts), dim=split) for part in parts]
    return [torch.cat([of_rank[rank] for of_rank in pieces], dim=concat) for rank in range(len(parts))]


def _scatter(parts: list[Tensor], dim: int) -> list[Tensor]:
    return list(torch.stack(parts).sum(0).chunk(len(parts), dim=dim))


def _case_along(dim: int) -> dict[str, Case]:
    other = (dim + 1) % 3
    return {
        f"gather, {dim}": Case(
            lambda x, group: GatherParts.apply(x, group, dim, x.dtype),
            lambda parts: [torch.cat(parts, dim)] * len(parts),
        ),
        f"scatter, {dim}": Case(lambda x, group: ScatterSum.apply(x, group, dim), lambda parts: _scatter(parts, dim)),
        f"exchange, {dim} for {other}": Case(
            lambda x, group: ExchangeParts.apply(x, group, dim, other), lambda parts: _exchange(parts, dim, other)
        ),
        f"exchange, {other} for {dim}": Case(
            lambda x, group: ExchangeParts.apply(x, group, other, dim), lambda parts: _exchange(parts, other, dim)
        ),
    }


CASES = {
    **_case_along(0),
    **_case_along(1),
    **_case_along(2),
    "rows": Case(lambda x, group: gather_rows(x), lambda parts: [torch.cat(parts)] * len(parts)),
    # of what all ranks have: the first's, here
    "use on all": Case(lambda x, group: CopyToRanks.apply(x, group), lambda parts: [parts[0]] * len(parts)),
    "sum": Case(
        lambda x, group: ReduceFromRanks.apply(x, group),
        lambda parts: [torch.stack(parts).sum(0)] * len(parts),
        is_shared=True,
    ),
    "join columns": Case(
        lambda x, group: JoinColumns.apply(x, group), lambda parts: [torch.cat(parts, -1)] * len(parts), is_shared=True
    ),
}


def draw(*shape: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return small whole numbers, whose sums no dtype rounds: equal means equal."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def run_on_one(case: Case, name: str, *, num_ranks: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return what each rank gets, and the gradient of what it has."""
    parts = [draw(*SHAPE, rank=rank, dtype=dtype).requires_grad_() for rank in range(num_ranks)]
    outs = case.on_one(parts)
    uses = [draw(*out.shape, rank=0 if case.is_shared else 9 + rank, dtype=dtype) for rank, out in enumerate(outs)]
    total = sum((use * out).sum() for use, out in list(zip(uses, outs, strict=True))[: 1 if case.is_shared else None])
    grads = torch.autograd.grad(total, parts, allow_unused=True)
    if name == "use on all":
        grads = [grads[0]] * num_ranks
    return outs, list(grads)


def run_on_rank(case: Case, name: str, rank: int, *, dtype: torch.dtype, backend: str | None) -> tuple[Tensor, Tensor]:
    """Return what this rank gets, and the gradient of what it has."""
    apply = case.apply if backend is None else torch.compile(case.apply, fullgraph=True, backend=backend, dynamic=False)
    x = draw(*SHAPE, rank=0 if name == "use on all" else rank, dtype=dtype).requires_grad_()
    out = apply(x, dist.group.WORLD)
    (out * draw(*out.shape, rank=0 if case.is_shared else 9 + rank, dtype=dtype)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def check(names: list[str], *, num_ranks: int, dtype: torch.dtype, backend: str | None = None) -> None:
    """Compare some cases on several ranks with the same on one device."""

    def work(rank: int) -> list[tuple[Tensor, Tensor]]:
        return [run_on_rank(CASES[name], name, rank, dtype=dtype, backend=backend) for name in names]

    of_ranks = run_on_threads(work, num_ranks=num_ranks)
    for index, name in enumerate(names):
        outs, grads = run_on_one(CASES[name], name, num_ranks=num_ranks, dtype=dtype)
        for rank in range(num_ranks):
            out, grad = of_ranks[rank][index]
            assert out.dtype == grad.dtype == dtype
            assert torch.equal(out, outs[rank]), f"{name} on rank {rank}"
            assert torch.equal(grad, grads[rank]), f"the gradient of {name} on rank {rank}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_result_and_gradient_are_those_of_one_device(num_ranks: int, dtype: torch.dtype) -> None:
    check(list(CASES), num_ranks=num_ranks, dtype=dtype)


def test_the_compiler_traces_each_in_one_graph_with_the_same_gradient() -> None:
    torch._dynamo.reset()
    names = ["gather, 1", "rows", "scatter, 1", "exchange, 1 for 2", "use on all", "sum", "join columns"]
    check(names, num_ranks=2, dtype=torch.float32, backend="aot_eager")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_not_contiguous_is_exchanged_as_well(num_ranks: int) -> None:
    """Queries are transposed views: [B, T, H, Q] -> [B, H, T, Q]."""

    def work(rank: int) -> list[Tensor]:
        x = draw(2, 8, 4, 3, rank=rank, dtype=torch.float32).transpose(1, 2)
        group: Any = dist.group.WORLD
        return [
            collectives.exchange_parts(x, group, split=1, concat=2),
            collectives.gather_parts(x, group, dim=2),
            collectives.scatter_sum(x, group, dim=2),
        ]

    of_ranks = run_on_threads(work, num_ranks=num_ranks)
    parts = [draw(2, 8, 4, 3, rank=rank, dtype=torch.float32).transpose(1, 2) for rank in range(num_ranks)]
    for rank in range(num_ranks):
        exchanged, gathered, scattered = of_ranks[rank]
        assert torch.equal(exchanged, _exchange(parts, 1, 2)[rank])
        assert torch.equal(gathered, torch.cat(parts, 2))
        assert torch.equal(scattered, _scatter(parts, 2)[rank])


def test_an_exchange_and_its_reverse_give_back_what_a_rank_had() -> None:
    def work(rank: int) -> bool:
        x = torch.randn(2, 4, 8, 3, generator=torch.Generator().manual_seed(rank))
        group: Any = dist.group.WORLD
        there = collectives.exchange_parts(x, group, split=1, concat=2)
        return torch.equal(collectives.exchange_parts(there, group, split=2, concat=1), x)

    assert run_on_threads(work) == [True] * 4


def test_the_largest_and_the_sum_over_a_group_are_those_of_its_ranks_alone() -> None:
    def work(rank: int) -> tuple[float, float, float, float]:
        own, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        value = torch.tensor([float(rank), -1.0])
        largest = reduce_parts(value, own, reduction="max")
        added = reduce_parts(value, own)
        cpu = torch.device("cpu")
        assert value.tolist() == [float(rank), -1.0], "they leave what they are given"
        return (
            float(largest[0]),
            float(added[0]),
            float(sum_over_ranks(value, cpu, own)[0]),
            float(sum_over_ranks(value, cpu)[0]),
        )

    assert run_on_threads(work) == [(2, 2, 2, 6), (3, 4, 4, 6), (2, 2, 2, 6), (3, 4, 4, 6)]


def test_the_largest_is_no_rank_s_minus_inf_where_another_has_a_number() -> None:
    """Of a rank whose columns are all padding the largest logit is -inf."""

    def work(rank: int) -> list[float]:
        value = torch.tensor([-float("inf"), -float("inf") if rank else 5.0])
        group: Any = dist.group.WORLD
        largest: list[float] = reduce_parts(value, group, reduction="max").tolist()
        return largest

    assert run_on_threads(work, num_ranks=2) == [[-float("inf"), 5.0]] * 2


def test_an_average_replaces_each_tensor_on_every_rank() -> None:
    def work(rank: int) -> list[float]:
        tensors = [torch.tensor([float(rank)]), torch.tensor([4.0 * rank])]
        average_over_ranks(tensors)
        return [float(tensor) for tensor in tensors]

    assert run_on_threads(work) == [[1.5, 6.0]] * 4


def test_without_ranks_a_sum_is_the_value_itself() -> None:
    value = torch.ones(3)
    assert sum_over_ranks(value, torch.device("cpu")) is value


def test_what_is_sent_is_rounded_to_the_dtype_of_a_product_and_its_gradient_is_not() -> None:
    third = 1 / 3

    def work(rank: int) -> list[tuple[Tensor, Tensor]]:
        found = []
        for send in (
            lambda x: GatherParts.apply(x, dist.group.WORLD, 0, torch.bfloat16),
            lambda x: ExchangeRows.apply(x, dist.group.WORLD, [1, 1], [1, 1], torch.bfloat16),
        ):
            x = torch.full((2, 3), third, requires_grad=True)
            out = send(x)
            (third * out).sum().backward()
            assert x.grad is not None
            found.append((out.detach(), x.grad))
        return found

    for gathered, exchanged in run_on_threads(work, num_ranks=2):
        for out, grad, uses in ((*gathered, 2), (*exchanged, 1)):  # both ranks use what was gathered
            assert out.dtype == grad.dtype == torch.float32
            assert (out == torch.tensor(third).bfloat16().float()).all()
            assert (grad == torch.tensor(third) * uses).all()
