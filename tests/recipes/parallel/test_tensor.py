"""Decoders whose matrices are divided over ranks: logits, loss and every gradient are those of one device."""

from typing import Any

import pytest
import torch
from mesh_models import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    MODELS,
    SEQ_LEN,
    VOCAB_SIZE,
    gradient_differences,
    gradients_of,
    make_batch,
    make_model,
    run_backward,
)
from one_text import generate
from thread_ranks import run_on_threads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from recipes.errors import ConfigError
from recipes.mesh import Mesh
from recipes.parallel.placement import cut_box, find_box, find_row_orders
from recipes.parallel.tensor import apply_tensor_parallel

SMALL = [name for name in MODELS if name not in ("llama, 2 groups", "llama, 3 heads")]
MESHES = {
    "2": Mesh(tensor=2),
    "4": Mesh(tensor=4),
    "2 x 2": Mesh(shard=2, tensor=2),
    "2 x 1 x 2": Mesh(replicate=2, tensor=2),
}
_WHOLE = {"sequence parallel": True, "whole sequences": False}


def _mesh(name: str, splits: str) -> Mesh:
    mesh = MESHES[name]
    return Mesh(replicate=mesh.replicate, shard=mesh.shard, tensor=mesh.tensor, sequence_parallel=_WHOLE[splits])


def compare(name: str, mesh: Mesh, *, packed: bool = False, in_chunks: bool = True, seq_len: int = SEQ_LEN) -> None:
    """Compare one backward pass on the ranks of a mesh with that on one device."""
    batch = make_batch(packed=packed, seq_len=seq_len)
    one = make_model(name)
    expected_loss = run_backward(one, batch, in_chunks=in_chunks)
    expected = gradients_of(one)

    def work(rank: int) -> tuple[Tensor, dict[str, float]]:
        model = make_model(name, mesh)
        loss = run_backward(model, batch, mesh, rank=rank, in_chunks=in_chunks)
        return loss, dict(gradient_differences(model, expected))

    of_ranks = run_on_threads(work, num_ranks=mesh.world_size)
    losses = {mesh.data_rank(rank): loss for rank, (loss, _) in enumerate(of_ranks)}
    assert all(torch.equal(loss, losses[mesh.data_rank(rank)]) for rank, (loss, _) in enumerate(of_ranks))
    torch.testing.assert_close(sum(losses.values()), expected_loss, rtol=LOSS_TOLERANCE, atol=0)
    for _, differences in of_ranks:
        assert max(differences.values()) < GRADIENT_TOLERANCE, differences


@pytest.mark.parametrize("splits", _WHOLE)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, "4") for name in SMALL),
        ("gpt2", "2 x 2"),
        ("llama", "2 x 2"),
        ("gpt2, untied", "2"),
        ("llama", "2 x 1 x 2"),
    ],
)
def test_loss_and_every_gradient_are_those_of_one_device(name: str, mesh: str, splits: str) -> None:
    compare(name, _mesh(mesh, splits))


@pytest.mark.parametrize(("name", "splits"), [("gpt2", "sequence parallel"), ("llama", "whole sequences")])
def test_with_all_logits_too(name: str, splits: str) -> None:
    compare(name, _mesh("2 x 2", splits), in_chunks=False)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("splits", _WHOLE)
def test_documents_in_one_row_do_not_see_each_other(name: str, splits: str) -> None:
    compare(name, _mesh("4", splits), packed=True)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_sequence_that_does_not_divide_is_whole_on_every_rank(name: str) -> None:
    compare(name, MESHES["4"], seq_len=15)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("splits", _WHOLE)
def test_logits_are_those_of_one_device_and_padding_is_hidden_on_every_rank(name: str, splits: str) -> None:
    inputs, mesh = make_batch().inputs, _mesh("4", splits)
    with torch.no_grad():
        expected = make_model(name)(inputs)

    def work(rank: int) -> Tensor:
        with torch.no_grad():
            logits: Tensor = make_model(name, mesh)(inputs)
            return logits

    first, *others = run_on_threads(work)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-6 * float(expected[..., :VOCAB_SIZE].abs().max()))
    assert (first[..., VOCAB_SIZE:] == -torch.inf).all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generated_tokens_are_those_of_one_device(name: str) -> None:
    """Single tokens divide over no ranks, and the cache holds a rank's heads."""
    options: Any = {"temperature": 1.0, "top_k": None, "top_p": None, "seed": 3}
    expected = generate(make_model(name), [1, 2, 3, 4], 10, **options)
    mesh = Mesh(shard=2, tensor=2)

    def work(rank: int) -> tuple[list[int], float]:
        model = make_model(name, mesh)
        tokens = generate(model, [1, 2, 3, 4], 10, **options)
        return tokens, float(run_backward(model, make_batch(), mesh, rank=rank))  # which divides the sequence again

    of_ranks = run_on_threads(work)
    assert [tokens for tokens, _ in of_ranks] == [expected] * 4
    loss = float(run_backward(make_model(name), make_batch()))
    assert of_ranks[0][1] + of_ranks[2][1] == pytest.approx(loss, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "mesh", [*MESHES.values(), Mesh(shard=3), Mesh(context=2, tensor=2)], ids=lambda mesh: str(mesh.sizes())
)
def test_first_weights_are_bit_for_bit_those_of_one_device(name: str, mesh: Mesh) -> None:
    expected = make_model(name, initialize=lambda model: model.init_weights(5)).state_dict()

    def work(rank: int) -> list[str]:
        model = make_model(name, mesh, initialize=lambda model: model.init_weights(5))
        orders, state = find_row_orders(model), model.state_dict(keep_vars=True)
        assert state.keys() == expected.keys()
        if model.tie_embeddings:
            assert model.head.weight is model.embedding.weight
        wrong = []
        for key, parameter in state.items():
            whole = expected[key]
            if id(parameter) in orders:
                whole = orders[id(parameter)].to_ranks(whole)
            assert isinstance(parameter, DTensor)
            if not torch.equal(parameter.to_local(), cut_box(whole, *find_box(parameter))):
                wrong.append(key)
        return wrong

    assert run_on_threads(work, num_ranks=mesh.world_size) == [[]] * mesh.world_size


def test_a_rank_holds_queries_keys_and_values_of_its_own_heads() -> None:
    mesh = Mesh(tensor=2)
    qkv = make_model("llama").blocks[0].attention.qkv.weight  # [(8 + 4 + 4) 4, 32]

    def work(rank: int) -> Tensor:
        local: Tensor = make_model("llama", mesh).blocks[0].attention.qkv.weight.to_local()
        return local.detach().clone()

    first, second = run_on_threads(work, num_ranks=2)
    assert torch.equal(first, torch.cat([qkv[:16], qkv[32:40], qkv[48:56]]))
    assert torch.equal(second, torch.cat([qkv[16:32], qkv[40:48], qkv[56:]]))


def test_each_rank_holds_its_share_of_every_matrix() -> None:
    def work(rank: int) -> dict[str, int]:
        model = make_model("gpt2, untied", Mesh(tensor=4))
        return {name: parameter.to_local().numel() for name, parameter in model.named_parameters()}

    whole = {name: parameter.numel() for name, parameter in make_model("gpt2, untied").named_parameters()}
    for held in run_on_threads(work):
        for name, number in held.items():
            on_every_rank = "norm" in name or name in ("position.weight",) or name.endswith(".out.bias")
            assert number == (whole[name] if on_every_rank else whole[name] // 4), name


def test_under_autocast_gradients_are_as_close_to_float32_as_those_of_one_device() -> None:
    """Sums of parts are rounded to bfloat16 once more, and each product adds up fewer terms."""
    batch, mesh = make_batch(), Mesh(shard=2, tensor=2)
    one = make_model("llama")
    run_backward(one, batch)
    exact = gradients_of(one)
    low = make_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        expected_loss = run_backward(low, batch)
    errors = {
        name: float((g - exact[name]).abs().max() / exact[name].abs().max()) for name, g in gradients_of(low).items()
    }

    def work(rank: int) -> tuple[float, dict[str, float]]:
        model = make_model("llama", mesh, precision="bf16-mixed")
        with torch.autocast("cpu", torch.bfloat16):
            loss = run_backward(model, batch, mesh, rank=rank)
        return float(loss), dict(gradient_differences(model, exact))

    of_ranks = run_on_threads(work)
    assert of_ranks[0][0] + of_ranks[2][0] == pytest.approx(float(expected_loss), rel=2**-8)  # bits of bfloat16
    found = {name: max(differences[name] for _, differences in of_ranks) for name in exact}
    assert sum(found.values()) < 1.3 * sum(errors.values()), (found, errors)


def test_a_model_that_does_not_say_how_is_rejected() -> None:
    def work(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        try:
            apply_tensor_parallel(nn.Linear(4, 4), mesh, sequence_parallel=True)
        except ConfigError as mistake:
            return str(mistake)
        return ""

    [first, second] = run_on_threads(work, num_ranks=2)
    assert first == second
    assert first.startswith("tensor_parallel_size=2: Linear has no plan that shards its matrices; type ")


def test_a_layer_of_another_kind_is_rejected() -> None:
    class Other(nn.Module):
        tensor_parallel = {"conv": "columns"}

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 1)

    def work(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        try:
            apply_tensor_parallel(Other(), mesh, sequence_parallel=True)
        except TypeError as error:
            return str(error)
        return ""

    assert run_on_threads(work, num_ranks=2) == ["Conv1d has no tensor-parallel version for 'columns'"] * 2
