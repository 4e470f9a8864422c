"""Losses, objective and gradients where ranks divide the vocabulary are those of `HeadLoss` on one device."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from thread_ranks import run_on_threads
from torch import Tensor

from recipes.numerics.head_loss import HeadLoss
from recipes.numerics.loss import IGNORE_INDEX

NUM_ROWS = 64  # of the weight, with padding
SHAPE = (3, 8)  # of tokens
WIDTH = 16


@dataclass(frozen=True)
class Case:
    """A loss.

    Attributes:
        vocab_size: Rows that are no padding.
        options: Of `HeadLoss`.
        scale: Of the gradients in the forward pass.
        trains_weight: Whether the weight has a gradient.
        largest_logit: About, of the first row of tokens; None: of order 1.
        dtype: Of hidden states and weight.
    """

    vocab_size: int = 61
    options: dict[str, float] = field(default_factory=dict)
    scale: float | None = None
    trains_weight: bool = True
    largest_logit: float | None = None
    dtype: torch.dtype = torch.float64


CASES = {
    "plain": Case(),
    "no padding": Case(vocab_size=64),
    "padding on the last rank alone": Case(vocab_size=50),
    "a last rank of padding alone": Case(vocab_size=33),
    "label smoothing": Case(options={"label_smoothing": 0.1}),
    "z-loss": Case(options={"z_loss": 1e-2}),
    "both, and padding": Case(vocab_size=40, options={"label_smoothing": 0.2, "z_loss": 1e-3}),
    "a frozen weight": Case(trains_weight=False, options={"z_loss": 1e-3}),
    "a scale": Case(scale=256.0, options={"label_smoothing": 0.1}),
    "a logit of 10 000": Case(largest_logit=1e4),
    "a logit of 10 000, both": Case(largest_logit=1e4, options={"label_smoothing": 0.1, "z_loss": 1e-4}),
}


@dataclass(frozen=True)
class Result:
    """What a loss and its backward pass leave."""

    objective: Tensor
    loss: Tensor
    by_token: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor | None


def make_batch(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, the weight, and targets of which every third is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*SHAPE, WIDTH, generator=generator, dtype=torch.float64)  # [B, T, W]
    weight = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5  # [V', W]
    weight[case.vocab_size :] = 0.0
    targets = torch.randint(case.vocab_size, SHAPE, generator=generator)  # [B, T]
    if case.largest_logit is not None:
        hidden[0, :, 0], weight[: case.vocab_size, 0] = case.largest_logit, 1.0  # all logits of these tokens
    targets.view(-1)[::3] = IGNORE_INDEX
    return hidden.to(case.dtype), weight.to(case.dtype), targets


def compute(case: Case, *, chunk_tokens: int, compiles: bool = False) -> Result:
    """Return the loss on this rank: one of those of the process group, or one device."""
    hidden, weight, targets = make_batch(case)
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None:
        weight = weight.chunk(group.size())[group.rank()].clone()
    options = {"label_smoothing": 0.0, "z_loss": 0.0, **case.options}
    head: Any = HeadLoss(vocab_size=case.vocab_size, chunk_tokens=chunk_tokens, vocabulary_group=group, **options)
    if compiles:
        head.compile(backend="aot_eager", fullgraph=True)
    hidden.requires_grad_()
    weight.requires_grad_(case.trains_weight)
    scale = None if case.scale is None else torch.tensor(case.scale)
    objective, loss, by_token = head(hidden, weight, targets=targets, scale=scale)
    (objective * 0.5).backward()
    assert hidden.grad is not None
    assert (weight.grad is not None) == case.trains_weight
    return Result(objective.detach(), loss, by_token, hidden.grad, weight.grad)


def join(results: list[Result]) -> Result:
    """Return what ranks have computed as one: gradients of hidden states are added, as `TensorRanks.enter` does."""
    first = results[0]
    for other in results[1:]:
        for name in ("objective", "loss", "by_token"):
            assert torch.equal(getattr(first, name), getattr(other, name)), f"{name} is the same on all ranks"
    weight_grads = [result.weight_grad for result in results if result.weight_grad is not None]
    return Result(
        first.objective,
        first.loss,
        first.by_token,
        torch.stack([result.hidden_grad for result in results]).sum(0),
        torch.cat(weight_grads) if weight_grads else None,
    )


def assert_same(found: Result, expected: Result, *, rtol: float) -> None:
    """Compare; differences are those over the largest value of a tensor."""
    for name in ("objective", "loss", "by_token", "hidden_grad", "weight_grad"):
        one, other = getattr(found, name), getattr(expected, name)
        if other is None:
            assert one is None
            continue
        difference = float((one - other).abs().max() / other.abs().max())
        assert one.dtype == other.dtype
        assert difference < rtol, f"{name} differs by {difference:.1e}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_loss_and_its_gradients_are_those_of_one_device(name: str, num_ranks: int) -> None:
    case = CASES[name]
    found = join(run_on_threads(lambda rank: compute(case, chunk_tokens=9), num_ranks=num_ranks))
    # logits are the same to the last bit, and rounded to float32; sums of exponentials are added in another order
    assert_same(found, compute(case, chunk_tokens=9), rtol=5e-7)


@pytest.mark.parametrize("name", ["plain", "a last rank of padding alone", "both, and padding"])
def test_the_objective_is_that_of_torch_in_float64(name: str) -> None:
    case = CASES[name]
    hidden, weight, targets = make_batch(case)
    logits = (hidden.requires_grad_() @ weight.requires_grad_()[: case.vocab_size].T).flatten(0, 1)
    smoothing, z_loss = case.options.get("label_smoothing", 0.0), case.options.get("z_loss", 0.0)
    flat = targets.flatten()
    expected = F.cross_entropy(logits, flat, label_smoothing=smoothing, reduction="sum")
    expected = expected + z_loss * logits.logsumexp(1)[flat != IGNORE_INDEX].square().sum()
    (expected * 0.5).backward()
    found = join(run_on_threads(lambda rank: compute(case, chunk_tokens=24), num_ranks=4))
    # logits and their gradients are rounded to float32, once each
    for one, other in (
        (found.objective, expected.detach().float()),
        (found.hidden_grad, hidden.grad),
        (found.weight_grad, weight.grad),
    ):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=0, atol=5e-7 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precisions_round_as_one_device_does(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, options={"label_smoothing": 0.1, "z_loss": 1e-3})
    found = join(run_on_threads(lambda rank: compute(case, chunk_tokens=24), num_ranks=4))
    expected = compute(case, chunk_tokens=24)
    assert found.hidden_grad.dtype == dtype
    # bfloat16: each rank's part of the gradient of the hidden states is rounded before they are added
    assert_same(found, expected, rtol=1e-6 if dtype == torch.float32 else 2**-7)


def test_a_compiled_chunk_has_the_same_numbers() -> None:
    torch._dynamo.reset()
    case = CASES["both, and padding"]
    found = join(run_on_threads(lambda rank: compute(case, chunk_tokens=24, compiles=True), num_ranks=2))
    assert_same(found, compute(case, chunk_tokens=24), rtol=5e-7)


def test_padding_gets_no_gradient_and_ignored_targets_give_none() -> None:
    case = CASES["both, and padding"]
    found = join(run_on_threads(lambda rank: compute(case, chunk_tokens=24), num_ranks=4))
    _, _, targets = make_batch(case)
    ignored = targets == IGNORE_INDEX
    assert found.weight_grad is not None
    assert not found.weight_grad[case.vocab_size :].any()
    assert found.weight_grad[: case.vocab_size].any(dim=1).all()
    assert not found.hidden_grad[ignored].any()
    assert not found.by_token[ignored].any()
    assert found.by_token[~ignored].all()


@pytest.mark.parametrize("rank_of_nan", [0, 3])
def test_a_nan_on_one_rank_is_the_loss_of_all(rank_of_nan: int) -> None:
    def work(rank: int) -> list[bool]:
        hidden, weight, targets = make_batch(Case())
        weight = weight.chunk(4)[rank].clone()
        if rank == rank_of_nan:
            weight[0, 0] = float("nan")
        head = HeadLoss(
            vocab_size=61, chunk_tokens=24, label_smoothing=0.0, z_loss=0.0, vocabulary_group=dist.group.WORLD
        )
        objective, loss, _ = head(hidden, weight, targets=targets)
        return [bool(objective.isnan()), bool(loss.isnan())]

    assert run_on_threads(work) == [[True, True]] * 4


@pytest.mark.parametrize("vocab_size", [64, 50, 33])
def test_logits_and_losses_of_a_validation_are_equal_to_those_of_one_device(vocab_size: int) -> None:
    hidden, weight, targets = make_batch(Case(vocab_size=vocab_size))
    options: Any = {"vocab_size": vocab_size, "chunk_tokens": 7, "label_smoothing": 0.0, "z_loss": 0.0}
    one = HeadLoss(**options)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        head = HeadLoss(**options, vocabulary_group=dist.group.WORLD)
        own = weight.chunk(4)[rank]
        return head.logits(hidden.flatten(0, 1), own), head.token_losses(hidden, own, targets=targets)

    expected = one.logits(hidden.flatten(0, 1), weight)
    assert expected.shape == (24, vocab_size)
    for logits, losses in run_on_threads(work):
        # a product of 16 columns may add in another order than one of 64
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(losses, one.token_losses(hidden, weight, targets=targets), rtol=0, atol=1e-6)
