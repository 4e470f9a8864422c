"""The chunked loss against the one that has all logits: the same loss and the same gradients, to rounding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.model.decoder import Head
from recipes.numerics.head_loss import HeadLoss, split
from recipes.numerics.loss import IGNORE_INDEX, cross_entropy_sum, mean_per_sample, regularizer_sum

B, T, W, V, PADDED = 4, 24, 16, 50, 64


def make_batch(*, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Head, Tensor]:
    """Return hidden states [B, T, W], a head with padded rows, and targets [B, T], some without loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, W, generator=generator, dtype=dtype).requires_grad_()
    head = Head(W, PADDED, vocab_size=V).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(PADDED, W, generator=generator))
    targets = torch.randint(V, (B, T), generator=generator)
    targets[0, :9] = IGNORE_INDEX
    targets[2] = IGNORE_INDEX  # a whole chunk of 16 tokens has no target
    return hidden, head, targets


def with_all_logits(hidden: Tensor, head: Head, targets: Tensor, **regularizer: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    loss = cross_entropy_sum(logits, targets)
    return loss + regularizer_sum(logits[..., :V], targets, **regularizer), loss


def gradients_of(objective: Tensor, hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    for tensor in (hidden, head.weight):
        tensor.grad = None
    (objective * 0.125).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert head.weight.grad is not None
    return hidden.grad, head.weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 16, 40, 1000])
@pytest.mark.parametrize(
    "regularizer",
    [
        {"label_smoothing": 0.0, "z_loss": 0.0},
        {"label_smoothing": 0.1, "z_loss": 0.0},
        {"label_smoothing": 0.1, "z_loss": 1e-2},
    ],
)
def test_loss_and_gradients_are_those_of_all_logits(chunk_tokens: int, regularizer: dict[str, float]) -> None:
    hidden, head, targets = make_batch()
    chunked = HeadLoss(vocab_size=V, chunk_tokens=chunk_tokens, **regularizer)
    objective, loss, by_token = head(hidden, lambda x, weight: chunked(x, weight, targets=targets))
    found = gradients_of(objective, hidden, head)
    expected_objective, expected_loss = with_all_logits(hidden, head, targets, **regularizer)
    # float32 sums in another order: of 96 tokens, and of up to 50 columns
    torch.testing.assert_close(objective, expected_objective, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for ours, reference in zip(found, gradients_of(expected_objective, hidden, head), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=2e-6)
    assert by_token.shape == targets.shape
    torch.testing.assert_close(by_token.sum(), expected_loss, rtol=1e-6, atol=0)
    assert not by_token[targets == IGNORE_INDEX].any()
    assert not found[1][V:].any(), "padded rows are not trained"
    assert not found[0][targets == IGNORE_INDEX].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_as_close_to_float32_as_all_logits_are(dtype: torch.dtype) -> None:
    hidden, head, targets = make_batch()
    chunked = HeadLoss(vocab_size=V, chunk_tokens=16, label_smoothing=0.0, z_loss=0.0)
    exact = gradients_of(with_all_logits(hidden, head, targets, label_smoothing=0.0, z_loss=0.0)[0], hidden, head)
    errors = []
    with torch.autocast("cpu", dtype):
        for objective in (
            head(hidden, lambda x, weight: chunked(x, weight, targets=targets))[0],
            with_all_logits(hidden, head, targets, label_smoothing=0.0, z_loss=0.0)[0],
        ):
            found = gradients_of(objective, hidden, head)
            errors.append([float((ours - own).norm() / own.norm()) for ours, own in zip(found, exact, strict=True)])
    # each chunk's product is rounded by itself, and their sum is not: not exactly the same errors
    assert errors[0] == pytest.approx(errors[1], rel=0.15)


def test_small_gradients_survive_float16_where_the_loss_is_scaled() -> None:
    # 60,000 classes of equal probability: each is 1.7e-5, of which float16 has 8 bits, and the loss scale gives all
    vocab_size = 60_000
    hidden = torch.zeros(1, 2, W)
    hidden[..., 0] = 1e-3
    hidden.requires_grad_()
    head = Head(W, vocab_size, vocab_size=vocab_size)
    targets = torch.tensor([[0, 1]])
    scale = torch.tensor(1024.0)

    def other_classes(scale: Tensor | None) -> Tensor:
        chunked = HeadLoss(vocab_size=vocab_size, chunk_tokens=2, label_smoothing=0.0, z_loss=0.0)
        head.weight.grad = None
        with torch.no_grad():
            head.weight.zero_()
        with torch.autocast("cpu", torch.float16):
            objective, *_ = head(hidden, lambda x, weight: chunked(x, weight, targets=targets, scale=scale))
        (objective * 1024.0).backward()
        assert head.weight.grad is not None
        return head.weight.grad[2:, 0] / 1024.0

    expected = torch.full((vocab_size - 2,), 2 * 1e-3 / vocab_size)
    torch.testing.assert_close(other_classes(scale), expected, rtol=2e-3, atol=0)
    assert not torch.allclose(other_classes(None), expected, rtol=2e-3, atol=0)


def test_losses_of_tokens_add_up_to_the_loss_and_their_means_are_those_of_samples() -> None:
    hidden, head, targets = make_batch()
    chunked = HeadLoss(vocab_size=V, chunk_tokens=7, label_smoothing=0.1, z_loss=0.1)
    losses = head(hidden, lambda x, weight: chunked.token_losses(x, weight, targets=targets))
    assert losses.shape == (B, T)
    assert not losses[targets == IGNORE_INDEX].any()
    per_sample = losses.sum(dim=1) / (targets != IGNORE_INDEX).sum(dim=1)
    torch.testing.assert_close(per_sample, mean_per_sample(head(hidden), targets), equal_nan=True)


def test_no_tensor_has_the_size_of_all_logits() -> None:
    hidden, head, targets = make_batch()
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(tensor.numel() for tensor in (out if isinstance(out, tuple) else (out,)) if tensor is not None)
            return out

    chunked = HeadLoss(vocab_size=V, chunk_tokens=16, label_smoothing=0.1, z_loss=0.1)
    with Sizes():
        objective, *_ = head(hidden, lambda x, weight: chunked(x, weight, targets=targets))
        objective.backward()
    assert max(sizes) == max(16 * PADDED, B * T * W, PADDED * W)
    assert max(sizes) < B * T * V


def test_a_second_backward_pass_through_the_same_loss_is_an_error() -> None:
    hidden, head, targets = make_batch()
    chunked = HeadLoss(vocab_size=V, chunk_tokens=16, label_smoothing=0.0, z_loss=0.0)
    objective, *_ = head(hidden, lambda x, weight: chunked(x, weight, targets=targets))
    objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        objective.backward()


def test_compiled_chunks_are_one_graph_and_give_the_same_loss() -> None:
    hidden, head, targets = make_batch()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    chunked = HeadLoss(vocab_size=V, chunk_tokens=32, label_smoothing=0.1, z_loss=0.1)
    expected = chunked(hidden, head.weight, targets=targets)[0]
    chunked.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(chunked(hidden, head.weight, targets=targets)[0], expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "three chunks of one size"


@pytest.mark.parametrize(("num_tokens", "chunk", "sizes"), [(96, 40, [32] * 3), (7, 3, [3, 3, 1]), (5, 9, [5])])
def test_chunks_are_equal_parts(num_tokens: int, chunk: int, sizes: list[int]) -> None:
    assert [part.stop - part.start for part in split(num_tokens, chunk)] == sizes


def test_a_head_without_a_loss_gives_logits_with_hidden_padding() -> None:
    hidden, head, _ = make_batch()
    logits = head(hidden)
    assert torch.equal(logits[..., :V], F.linear(hidden, head.weight)[..., :V])
    assert torch.isneginf(logits[..., V:]).all()
