"""Decoders whose ranks divide every sequence: attention, loss and every gradient are those of one device."""

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
from one_text import generate
from thread_ranks import run_on_threads
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.mesh import Mesh
from recipes.model.decoder import attend
from recipes.model.documents import Documents
from recipes.model.kv_cache import KeyValueCache
from recipes.parallel.context import ContextRanks, apply_context_parallel

NUM_TOKENS, HEAD_SIZE = 16, 8
# query heads, key-value heads -> what ranks exchange, by their number
HEADS = {
    (4, 4): {2: "heads", 4: "heads"},
    (8, 2): {2: "heads", 4: "copied heads"},
    (4, 1): {2: "copied heads", 4: "copied heads"},
    (3, 3): {2: "keys", 4: "keys"},
    (6, 2): {2: "heads", 4: "keys"},
    (2, 1): {2: "copied heads", 4: "keys"},
}


def draw_heads(num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """Return queries, keys and values of all tokens, [B, H or G, T, Q], as transposed views."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, NUM_TOKENS, number, HEAD_SIZE, generator=generator).transpose(1, 2)
        for number in (num_heads, num_kv_heads, num_kv_heads)
    ]


def run_attention(parts: list[Tensor], weight: Tensor, **options: Any) -> list[Tensor]:
    """Return attention [B, H, t, Q], and the gradients of queries, keys and values."""
    leaves = [part.detach().requires_grad_() for part in parts]
    out = attend(*leaves, dropout=0.0, cache=None, **options)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def compare_attention(num_heads: int, num_kv_heads: int, *, num_ranks: int, documents: Documents | None) -> None:
    """Compare attention of some ranks with that of one device."""
    whole = draw_heads(num_heads, num_kv_heads)
    weight = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(1))
    expected = run_attention(whole, weight, documents=documents)

    def work(rank: int) -> list[Tensor]:
        group: Any = dist.group.WORLD
        context = ContextRanks(group)
        own = [context.own_tokens(part, dim=2) for part in whole]
        return run_attention(own, context.own_tokens(weight, dim=2), documents=documents, context=context)

    of_ranks = run_on_threads(work, num_ranks=num_ranks)
    for found, reference in zip(zip(*of_ranks, strict=True), expected, strict=True):
        # another kernel for masks, and other sizes of products: float32 sums in another order
        torch.testing.assert_close(torch.cat(found, dim=2), reference, rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_attention_and_its_gradients_are_those_of_one_device(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    compare_attention(num_heads, num_kv_heads, num_ranks=num_ranks, documents=None)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_documents_in_one_row_do_not_see_each_other(num_heads: int, num_kv_heads: int) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(6), torch.arange(5)]).repeat(2, 1)  # across ranks
    positions[1] = torch.arange(NUM_TOKENS)
    compare_attention(num_heads, num_kv_heads, num_ranks=4, documents=Documents(positions, dropout=0.0))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_heads_move_where_they_divide_and_keys_and_values_where_not(
    num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    shapes: list[tuple[int, ...]] = []

    def record(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shapes.append((*queries.shape[1:3], *keys.shape[1:3]))
        return queries

    def work(rank: int) -> Tensor | None:
        group: Any = dist.group.WORLD
        context = ContextRanks(group)
        own = [context.own_tokens(part, dim=2) for part in draw_heads(num_heads, num_kv_heads)]
        return context.exchange(*own, record)

    kind = HEADS[num_heads, num_kv_heads][num_ranks]
    outs = run_on_threads(work, num_ranks=num_ranks)
    if kind == "keys":
        assert outs == [None] * num_ranks
        assert shapes == []
    else:
        kept = num_kv_heads if kind == "heads" else num_heads
        assert set(shapes) == {(num_heads // num_ranks, NUM_TOKENS, kept // num_ranks, NUM_TOKENS)}
        # there and back again: the queries of this rank
        queries, *_ = draw_heads(num_heads, num_kv_heads)
        assert torch.equal(torch.cat(outs, dim=2), queries)  # type: ignore[arg-type]


def compare_model(name: str, mesh: Mesh, *, packed: bool, in_chunks: bool = True) -> None:
    """Compare one backward pass on the ranks of a mesh with that on one device."""
    batch, one = make_batch(packed=packed), make_model(name)
    expected_loss = run_backward(one, batch)
    expected = gradients_of(one)

    def work(rank: int) -> tuple[Tensor, dict[str, float]]:
        model = make_model(name, mesh)
        loss = run_backward(model, batch, mesh, rank=rank, in_chunks=in_chunks)
        return loss, dict(gradient_differences(model, expected))

    of_ranks = run_on_threads(work, num_ranks=mesh.world_size)
    total = sum(loss for rank, (loss, _) in enumerate(of_ranks) if mesh.place(rank).tensor == 0)
    torch.testing.assert_close(total, expected_loss, rtol=LOSS_TOLERANCE, atol=0)
    for _, differences in of_ranks:
        assert max(differences.values()) < GRADIENT_TOLERANCE, differences


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2", Mesh(context=2)),
        ("gpt2", Mesh(shard=2, context=2)),
        ("gpt2", Mesh(context=2, tensor=2)),
        ("llama", Mesh(context=4)),
        ("llama", Mesh(replicate=2, context=2)),
        ("llama, 2 groups", Mesh(context=4)),
        ("llama, 3 heads", Mesh(context=2)),
        ("llama, 2 groups", Mesh(context=2, tensor=2)),
        ("llama", Mesh(context=2, tensor=2, sequence_parallel=False)),
    ],
    ids=str,
)
def test_loss_and_every_gradient_are_those_of_one_device(name: str, mesh: Mesh, packed: bool) -> None:
    compare_model(name, mesh, packed=packed)


def test_with_all_logits_too() -> None:
    compare_model("gpt2", Mesh(context=2, tensor=2), packed=False, in_chunks=False)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_of_a_part_are_those_of_its_positions(name: str) -> None:
    inputs = make_batch().inputs
    with torch.no_grad():
        expected = make_model(name)(inputs)

    def work(rank: int) -> Tensor:
        model = make_model(name, Mesh(context=4))
        with torch.no_grad():
            logits: Tensor = model(model.context.own_tokens(inputs, dim=1))
            return logits

    found = torch.cat(run_on_threads(work), dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # logits of order 10


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, 3 heads"])
def test_text_is_generated_by_every_rank_alone(name: str) -> None:
    options: Any = {"temperature": 1.0, "top_k": None, "top_p": None, "seed": 3}
    expected = generate(make_model(name), [1, 2, 3], 10, **options)
    one, prompt = make_model(name), make_batch().inputs[:1, :5]
    logits = one(prompt, KeyValueCache(num_layers=2, capacity=16)).detach()

    def work(rank: int) -> tuple[list[int], Tensor]:
        model = make_model(name, Mesh(context=2))
        cache = KeyValueCache(num_layers=2, capacity=16)
        return generate(model, [1, 2, 3], 10, **options), model(prompt, cache).detach()

    for tokens, of_prompt in run_on_threads(work, num_ranks=2):
        assert tokens == expected
        assert torch.equal(of_prompt, logits)


def test_tokens_that_do_not_divide_name_the_setting() -> None:
    def work(rank: int) -> str:
        group: Any = dist.group.WORLD
        with pytest.raises(ValueError, match="15 tokens are not divisible by context_parallel_size=4") as caught:
            ContextRanks(group).own_tokens(torch.zeros(2, 15), dim=1)
        return str(caught.value)

    assert len(set(run_on_threads(work))) == 1


def test_a_model_that_does_not_say_how_is_rejected() -> None:
    def work(rank: int) -> str:
        group: Any = dist.group.WORLD
        with pytest.raises(ConfigError) as caught:
            apply_context_parallel(nn.Linear(4, 4), group)
        return str(caught.value)

    first, second = run_on_threads(work, num_ranks=2)
    assert first == second
    assert first.startswith("context_parallel_size=2: the attention of Linear cannot be sharded along the sequence; ")


def test_a_row_attends_to_the_tokens_up_to_its_own_position() -> None:
    """Torch's causal mask is aligned at the first key: rank 1 would see the first tokens alone."""

    def work(rank: int) -> Tensor:
        group: Any = dist.group.WORLD
        return ContextRanks(group).causal_rows(4, device=torch.device("cpu"))

    assert torch.equal(torch.cat(run_on_threads(work)), torch.ones(16, 16, dtype=torch.bool).tril())
