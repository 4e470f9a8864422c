"""One norm, one overflow flag and one verdict where tensor parallelism and FSDP2 place gradients in several ways."""

import itertools
from typing import Any

import pytest
import torch
from mesh_models import ThreadStrategy, gradients_of, make_batch, make_model, run_backward
from thread_ranks import run_on_threads
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from recipes.mesh import Mesh
from recipes.parallel.placement import cut_box, find_box
from recipes.strategy.precision_plugin import CountingScaler
from recipes.strategy.torch_native import clip_gradients, global_norm

# of a matrix cut by columns of its output, by rows, and of a norm that every rank of a tensor group has whole
CUTS: dict[str, Placement] = {"columns": Shard(0), "rows": Shard(1), "norm": Replicate()}
SHAPES = {"columns": (6, 5), "rows": (5, 6), "norm": (7,), "on every rank": (3, 2), "on another mesh": (5, 3)}
WHOLE = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(index))
    for index, (name, shape) in enumerate(SHAPES.items())
}


def make_parameters() -> dict[str, nn.Parameter]:
    """Return parameters on two shards of two ranks; gradients are `WHOLE`. Threads share what is not copied."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    made = {name: _shard_after_cut(WHOLE[name], mesh, cut) for name, cut in CUTS.items()}
    replicated = distribute_tensor(WHOLE["on every rank"].clone(), mesh, [Replicate(), Replicate()])
    of_all = distribute_tensor(WHOLE["on another mesh"], init_device_mesh("cpu", (4,)), [Shard(0)])
    made |= {"on every rank": nn.Parameter(replicated), "on another mesh": nn.Parameter(of_all)}
    for parameter in made.values():
        parameter.grad = parameter.detach().clone()
    return made


def _shard_after_cut(values: Tensor, mesh: DeviceMesh, cut: Placement) -> nn.Parameter:
    module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(distribute_tensor(values, mesh["tensor"], [cut]))
    fully_shard(module, mesh=mesh["shard"])
    return module.weight


def local_gradient(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def find_part(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return cut_box(whole, *find_box(parameter))


def test_the_norm_is_that_of_all_elements_in_every_order_of_gradients() -> None:
    exact = torch.cat([values.flatten() for values in WHOLE.values()]).double().norm().item()

    def work(rank: int) -> set[float]:
        parameters = make_parameters()
        orders = itertools.permutations(parameters)
        return {global_norm([parameters[name].grad for name in order]).item() for order in orders}  # type: ignore[misc]

    of_ranks = run_on_threads(work)
    for norms in of_ranks:
        assert norms == of_ranks[0], "bit for bit the same on all ranks"
        for norm in norms:
            assert norm == pytest.approx(exact, rel=2e-7)  # float32


@pytest.mark.parametrize("names", [["norm"], ["columns"], ["rows"], ["on every rank"], ["rows", "norm"]], ids=str)
def test_the_norm_of_some_is_theirs(names: list[str]) -> None:
    exact = torch.cat([WHOLE[name].flatten() for name in names]).double().norm().item()

    def work(rank: int) -> float:
        parameters = make_parameters()
        return global_norm([parameters[name].grad for name in names]).item()  # type: ignore[misc]

    assert run_on_threads(work) == [pytest.approx(exact, rel=2e-7)] * 4


def test_clipping_scales_every_element_alike_in_every_order_of_gradients() -> None:
    exact = torch.cat([values.flatten() for values in WHOLE.values()]).norm().item()

    def work(rank: int) -> None:
        parameters = make_parameters()
        for order in itertools.permutations(parameters):
            for parameter in parameters.values():
                parameter.grad = parameter.detach().clone()
            clip_gradients([parameters[name] for name in order], max_norm=0.5, max_value=None)
            for name, parameter in parameters.items():
                part = find_part(parameter, WHOLE[name] * (0.5 / exact))
                # one product in float32, by a factor whose norm is rounded; torch adds 1e-6 to it
                torch.testing.assert_close(local_gradient(parameter), part, rtol=1e-6, atol=0)

    run_on_threads(work)


def test_clipping_by_value_bounds_every_element() -> None:
    def work(rank: int) -> None:
        parameters = make_parameters()
        clip_gradients(parameters.values(), max_norm=None, max_value=0.25)
        for name, parameter in parameters.items():
            assert torch.equal(local_gradient(parameter), find_part(parameter, WHOLE[name].clamp(-0.25, 0.25)))

    run_on_threads(work)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(shard=2, tensor=2),
        Mesh(replicate=2, tensor=2),
        Mesh(context=2, tensor=2),
        Mesh(replicate=2, shard=2),
        Mesh(shard=2, tensor=2, sequence_parallel=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_norm_of_a_divided_model_is_that_of_one_device(name: str, mesh: Mesh) -> None:
    batch, one = make_batch(), make_model(name)
    run_backward(one, batch)
    exact = global_norm(list(gradients_of(one).values())).item()

    def work(rank: int) -> float:
        model = make_model(name, mesh)
        run_backward(model, batch, mesh, rank=rank)
        norm, _ = clip_gradients(model.parameters(), max_norm=1.0, max_value=None)
        assert all(parameter.device_mesh.size() == 4 for parameter in model.parameters()), "each counts once"
        return norm.item()

    of_ranks = run_on_threads(work)
    assert of_ranks == [of_ranks[0]] * 4
    assert of_ranks[0] == pytest.approx(exact, rel=1e-6)  # gradients differ in their last digits


@pytest.mark.parametrize("rank_of_inf", range(4))
def test_an_inf_on_one_rank_alone_is_the_flag_of_all_whatever_the_order(rank_of_inf: int) -> None:
    """Also of what other ranks hold as well, but with another value: a damaged one."""

    def work(rank: int) -> list[float]:
        flags = []
        for name in SHAPES:
            parameters = make_parameters()
            if rank == rank_of_inf and local_gradient(parameters[name]).numel():
                local_gradient(parameters[name]).view(-1)[0] = torch.inf
            for first in parameters:
                order = [first, *(other for other in parameters if other != first)]
                optimizer = torch.optim.SGD([parameters[key] for key in order], lr=1.0)
                found = CountingScaler("cpu")._unscale_grads_(
                    optimizer, torch.ones(1), torch.zeros(1), allow_fp16=False
                )
                flags += [flag.item() for flag in found.values()]
        return flags

    of_ranks = run_on_threads(work)
    # one number per damaged gradient and order; the last rank holds none of 5 rows on another mesh
    has_part = [not (name == "on another mesh" and rank_of_inf == 3) for name in SHAPES]
    expected = [float(has) for has in has_part for _ in SHAPES]
    assert of_ranks == [expected] * 4


def test_the_scaler_unscales_all_and_skips_the_step_on_all_ranks() -> None:
    def work(rank: int) -> list[tuple[int, bool, bool]]:
        parameters: dict[str, Any] = dict(make_parameters())
        optimizer = torch.optim.SGD(list(parameters.values()), lr=0.5)
        scaler, steps = CountingScaler("cpu", init_scale=4.0), []
        for scale, is_damaged in ((4.0, False), (4.0, True), (2.0, False)):
            before = {name: parameter.to_local().detach().clone() for name, parameter in parameters.items()}
            for parameter in parameters.values():
                parameter.grad = parameter.detach() * scale
            if is_damaged and rank == 3:
                local_gradient(parameters["rows"]).view(-1)[0] = torch.nan
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            unscaled = all(torch.equal(local_gradient(parameters[name]), values) for name, values in before.items())
            scaler.step(optimizer)
            scaler.update()
            halved = all(torch.equal(parameters[name].to_local(), values / 2) for name, values in before.items())
            same = all(torch.equal(parameters[name].to_local(), values) for name, values in before.items())
            assert halved != same
            steps.append((scaler.num_overflows, halved, unscaled or (is_damaged and rank == 3)))
        return steps

    assert run_on_threads(work) == [[(0, True, True), (1, False, True), (1, True, True)]] * 4


class Verdict:
    """A guard that skips steps on one rank alone."""

    def __init__(self, *, skips: bool) -> None:
        self.skips = skips

    def judge(self, norm: Tensor) -> Tensor:
        return torch.tensor(self.skips)


@pytest.mark.parametrize("rank_that_skips", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [Mesh(shard=2, tensor=2), Mesh(context=4)], ids=str)
def test_a_verdict_of_one_rank_is_that_of_all(mesh: Mesh, rank_that_skips: int | None) -> None:
    def work(rank: int) -> list[bool]:
        strategy: Any = ThreadStrategy(mesh)
        parameters = list(make_parameters().values())
        strategy.optimizers = [torch.optim.SGD(parameters, lr=1.0)]
        strategy.guard = Verdict(skips=rank == rank_that_skips)
        strategy.clip_gradients(parameters, max_norm=None, max_value=None)
        return [parameter.grad is None for parameter in parameters]

    assert run_on_threads(work) == [[rank_that_skips is not None] * len(SHAPES)] * 4
