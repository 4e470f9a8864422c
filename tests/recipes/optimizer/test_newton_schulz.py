"""The iteration keeps singular vectors, and brings singular values near 1."""

import pytest
import torch
from torch.optim import _muon

from recipes.optimizer.newton_schulz import orthogonalize


@pytest.mark.parametrize("shape", [(32, 32), (16, 48), (48, 16), (1, 7)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.logspace(0, -2, len(values))  # 1 to 0.01
    found = orthogonalize(left @ torch.diag(values) @ right)
    assert found.shape == shape
    inner = left.mT @ found @ right.mT  # singular vectors stay: this is diagonal
    diagonal = inner.diagonal()
    assert diagonal.min() > 0.6
    assert diagonal.max() < 1.3
    torch.testing.assert_close(inner, torch.diag(diagonal), rtol=0, atol=2e-4)  # noise, amplified up to 3.44^5 = 485


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_in_bfloat16_it_is_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    expected = _muon._zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7)
    # torch rounds the norm to bfloat16 as it sums, this one at the end: 2^-9 at most, and the slope is below 1 there
    torch.testing.assert_close(orthogonalize(matrix.bfloat16()), expected, rtol=0, atol=2e-2)


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not orthogonalize(torch.zeros(4, 3)).any()
