"""Rows by expert and back: every token reaches each of its experts, and gradients take the way back."""

import torch

from recipes.model.moe.dispatch import combine_rows, gather_rows, sort_by_expert

CHOSEN = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])  # [N, K]


def test_rows_are_sorted_by_expert_and_within_one_by_token() -> None:
    order = sort_by_expert(CHOSEN)
    tokens = order.by_expert // 2
    assert CHOSEN.flatten()[order.by_expert].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert tokens.tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert order.by_expert[order.by_token].tolist() == list(range(8))


def test_experts_that_change_nothing_return_each_token_times_the_sum_of_its_weights() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    order = sort_by_expert(CHOSEN)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0], [0.5, 0.25]], dtype=torch.float64)
    out = combine_rows(gather_rows(x, order), order, weights)
    torch.testing.assert_close(out, x * weights.sum(1, keepdim=True))


def test_gradients_are_those_of_finite_differences() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    order = sort_by_expert(CHOSEN)
    scale = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]  # each row has another

    def compute(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combine_rows(gather_rows(x, order) * scale, order, weights)

    assert torch.autograd.gradcheck(compute, (x, weights))
