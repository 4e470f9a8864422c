"""The divergence from a teacher is that of torch, over targets alone."""

import pytest
import torch
import torch.nn.functional as F

from recipes.numerics.loss import IGNORE_INDEX
from recipes.task.distillation import divergence_sum

LOGITS = torch.linspace(-3, 2, 2 * 5 * 7, dtype=torch.float64).sin().view(2, 5, 7) * 4  # [B, T, V]
WANTED = torch.linspace(-1, 4, 2 * 5 * 7, dtype=torch.float64).cos().view(2, 5, 7) * 3
TARGETS = torch.tensor([[1, 2, IGNORE_INDEX, 3, 4], [IGNORE_INDEX, IGNORE_INDEX, 0, 5, 6]])


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_the_sum_is_that_of_torch_over_the_targets(temperature: float) -> None:
    is_target = TARGETS != IGNORE_INDEX
    own, wanted = (F.log_softmax(x[is_target] / temperature, dim=-1) for x in (LOGITS, WANTED))
    expected = temperature**2 * F.kl_div(own, wanted, log_target=True, reduction="sum")
    found = divergence_sum(LOGITS, WANTED, TARGETS, temperature=temperature)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)  # computed in float32


def test_a_student_like_its_teacher_has_no_divergence_and_no_gradient() -> None:
    logits = WANTED.clone().requires_grad_()
    loss = divergence_sum(logits, WANTED, TARGETS, temperature=2.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6  # rounding of float32


def test_the_gradient_does_not_shrink_with_the_temperature() -> None:
    sizes = []
    for temperature in (4.0, 8.0):
        logits = LOGITS.clone().requires_grad_()
        divergence_sum(logits, WANTED, TARGETS, temperature=temperature).backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        sizes.append(logits.grad.norm().item())
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)
