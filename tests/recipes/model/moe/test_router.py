"""The router: which experts it chooses, what their weights are, and what its losses measure."""

import math

import pytest
import torch
import torch.nn.functional as F

from recipes.model.moe.router import Router, describe_loads, find_bias_steps

NUM_EXPERTS, HIDDEN = 8, 16


def make_router(
    *,
    scores: str = "softmax",
    renormalize: bool = True,
    num_chosen: int = 2,
    scale: float = 1.0,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
) -> Router:
    router = Router(
        HIDDEN,
        num_experts=NUM_EXPERTS,
        num_chosen=num_chosen,
        scores=scores,  # type: ignore[arg-type]
        renormalize=renormalize,
        scale=scale,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
    )
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


def hidden(batch: int = 3, length: int = 10) -> torch.Tensor:
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_weights_are_the_largest_scores_and_sum_to_one(scores: str) -> None:
    router, x = make_router(scores=scores), hidden()
    routing = router(x)
    logits = x @ router.weight.T
    expected = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    largest = expected.topk(2, dim=-1)
    assert torch.equal(routing.chosen, largest.indices)
    torch.testing.assert_close(routing.weights, largest.values / largest.values.sum(-1, keepdim=True))
    plain = make_router(scores=scores, renormalize=False)(x)
    torch.testing.assert_close(plain.weights, largest.values)


def test_the_bias_chooses_and_weighs_nothing() -> None:
    router, x = make_router(renormalize=False), hidden()
    router.bias[5] = 10.0
    routing = router(x)
    assert bool((routing.chosen == 5).any(dim=-1).all())
    scores = (x @ router.weight.T).softmax(-1)
    torch.testing.assert_close(routing.weights, scores.gather(-1, routing.chosen))
    assert int(routing.counts[5]) == 30


def test_a_token_uses_experts_of_the_groups_whose_two_best_score_highest() -> None:
    num_groups = NUM_EXPERTS // 2
    router, x = make_router(scores="sigmoid", num_groups=num_groups, num_chosen_groups=2, num_chosen=3), hidden()
    router.bias.copy_(torch.linspace(-0.02, 0.02, NUM_EXPERTS))
    chosen = router(x).chosen
    free = make_router(scores="sigmoid", num_chosen=3)
    free.load_state_dict(router.state_dict())
    assert not torch.equal(chosen, free(x).chosen)
    scores = F.linear(x, router.weight).sigmoid() + router.bias
    for of_token, own in zip(scores.flatten(0, 1).tolist(), chosen.flatten(0, 1).tolist(), strict=True):
        pairs = [(of_token[2 * group] + of_token[2 * group + 1], group) for group in range(num_groups)]
        groups = {group for _, group in sorted(pairs)[-2:]}
        eligible = sorted((score, expert) for expert, score in enumerate(of_token) if expert // 2 in groups)
        assert sorted(own) == sorted(expert for _, expert in eligible[-3:])


def test_weights_are_scaled_after_they_sum_to_one() -> None:
    router, x = make_router(scale=2.5), hidden()
    torch.testing.assert_close(router(x).weights.sum(dim=-1), torch.full(x.shape[:2], 2.5))


def test_counts_are_those_of_the_choices() -> None:
    routing = make_router()(hidden())
    assert routing.counts.tolist() == torch.bincount(routing.chosen.flatten(), minlength=NUM_EXPERTS).tolist()
    assert int(routing.counts.sum()) == 3 * 10 * 2


def test_scores_are_computed_in_float32_under_autocast_and_of_half_weights() -> None:
    router, x = make_router(), hidden()
    expected = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x).weights, expected.weights)
    router.bias[2] = 1 + 2**-20
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.bias.dtype == torch.float32
    assert float(router.bias[2]) == 1 + 2**-20
    assert router(x.bfloat16()).weights.dtype == torch.float32


def test_losses_of_a_router_without_preference_are_one_and_the_squared_logarithm() -> None:
    router = make_router()
    router.weight.data.zero_()
    balance, square, entropy = router(hidden()).terms.unbind()
    torch.testing.assert_close(balance, torch.ones(3))
    torch.testing.assert_close(square, torch.full((3,), math.log(NUM_EXPERTS) ** 2))
    torch.testing.assert_close(entropy, torch.full((3,), math.log(NUM_EXPERTS)))


def test_the_load_balance_loss_is_the_number_of_experts_where_all_tokens_prefer_one() -> None:
    router = make_router(num_chosen=1)
    router.weight.data.zero_()
    router.weight.data[3] = 100.0
    balance = router(torch.ones(2, 4, HIDDEN)).terms[0]
    torch.testing.assert_close(balance, torch.full((2,), float(NUM_EXPERTS)))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_losses_are_those_of_a_sequence_whatever_else_is_in_the_batch(scores: str) -> None:
    router, x = make_router(scores=scores), hidden()
    together = router(x).terms
    alone = torch.cat([router(part).terms for part in x.split(1)], dim=1)
    torch.testing.assert_close(together, alone)


def test_the_load_balance_loss_falls_along_its_gradient() -> None:
    router, x = make_router(num_chosen=1), hidden(batch=1, length=200)
    before = router(x).terms[0].sum()
    [gradient] = torch.autograd.grad(before, router.weight)
    router.weight.data -= 0.5 * gradient / gradient.norm()
    assert float(router(x).terms[0].sum()) < float(before) - 0.01


def test_biases_move_towards_the_mean_load_by_whole_numbers() -> None:
    counts = torch.tensor([[4, 2, 0, 2], [1, 1, 1, 2]])
    assert find_bias_steps(counts).tolist() == [[-1, 0, 1, 0], [1, 1, 1, -1]]
    largest, smallest = describe_loads(counts)
    assert (float(largest), float(smallest)) == (2.0, 0.0)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_padding_is_routed_and_in_no_load_and_no_term(scores: str) -> None:
    router, x, lengths = make_router(scores=scores), hidden(), [10, 1, 6]
    is_token = torch.arange(10) < torch.tensor(lengths)[:, None]
    routing = router(x, is_token)
    assert int(routing.counts.sum()) == 3 * 10 * 2, "the experts compute every row"
    alone = [router(row[None, :length]) for row, length in zip(x, lengths, strict=True)]
    assert torch.equal(routing.loads, torch.stack([each.loads for each in alone]).sum(dim=0))
    torch.testing.assert_close(routing.terms, torch.cat([each.terms for each in alone], dim=1))


def test_rows_without_padding_have_the_very_terms_of_rows_that_cannot_have_any() -> None:
    router, x = make_router(), hidden()
    given, plain = router(x, torch.ones(3, 10, dtype=torch.bool)), router(x)
    assert torch.equal(given.terms, plain.terms)
    assert torch.equal(given.loads, plain.loads)


def test_a_row_of_padding_alone_has_terms_of_zero() -> None:
    routing = make_router()(hidden(), torch.zeros(3, 10, dtype=torch.bool))
    assert not routing.terms.any()
    assert not routing.loads.any()
