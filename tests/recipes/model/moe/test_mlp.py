"""Rows by expert and back: every token reaches each of its experts, and gradients take the way back."""

import torch

from recipes.model.moe.llama import combine_rows
from recipes.numerics.permutation import permute_rows, sort_rows

CHOSEN = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])  # [N, K]


def test_rows_are_sorted_by_expert_and_within_one_by_token() -> None:
    order = sort_rows(CHOSEN.flatten())
    tokens = order.forward // 2
    assert CHOSEN.flatten()[order.forward].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert tokens.tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert order.forward[order.backward].tolist() == list(range(8))


def test_experts_that_change_nothing_return_each_token_times_the_sum_of_its_weights() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    order = sort_rows(CHOSEN.flatten())
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0], [0.5, 0.25]], dtype=torch.float64)
    out = combine_rows(permute_rows(x, order.forward, order.backward), order, weights)
    torch.testing.assert_close(out, x * weights.sum(1, keepdim=True))


def test_gradients_are_those_of_finite_differences() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    order = sort_rows(CHOSEN.flatten())
    scale = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]  # each row has another

    def compute(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combine_rows(permute_rows(x, order.forward, order.backward) * scale, order, weights)

    assert torch.autograd.gradcheck(compute, (x, weights))
