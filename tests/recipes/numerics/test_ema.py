"""The average of the weights equals a plain loop over the weights of every step."""

import pytest
import torch

from recipes.numerics.ema import NAME, average_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fused AdamW", "SGD"])
def test_the_average_covers_the_weights_of_every_step(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=dtype))
    optimizer = (
        torch.optim.AdamW([weight], lr=0.1, fused=True) if kind == "fused AdamW" else torch.optim.SGD([weight], lr=0.1)
    )
    step = 0
    average_weights(optimizer, decay=0.9, step=lambda: step)
    expected = None
    for step in range(30):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        now = weight.detach().float()
        new_weight = 1 - min(0.9, (1 + step) / (10 + step))
        expected = now.clone() if expected is None else expected + new_weight * (now - expected)
    found = optimizer.state[weight][NAME]
    assert found.dtype == torch.float32
    # the same float32 sums, multiplied in another order
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_without_gradients_leaves_the_average_unchanged() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    average_weights(optimizer, decay=0.9, step=lambda: 5)
    for _ in range(2):
        weight.grad = torch.ones(3)
        optimizer.step()
    before = optimizer.state[weight][NAME].clone()
    weight.grad = None
    optimizer.step()
    assert torch.equal(optimizer.state[weight][NAME], before)
