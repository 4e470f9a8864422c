"""A precision word means three dtypes, and Lightning takes the word."""

import pytest
import torch
from support import composed_config

from recipes.build import _make


@pytest.mark.parametrize(
    ("word", "param", "compute", "scales"),
    [
        ("32-true", torch.float32, torch.float32, False),
        ("bf16-mixed", torch.float32, torch.bfloat16, False),
        ("16-mixed", torch.float32, torch.float16, True),
        ("bf16-true", torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_a_word_means_its_dtypes(
    word: str, param: torch.dtype, compute: torch.dtype, scales: bool
) -> None:
    precision = _make(composed_config(f"precision={word}")["precision"])
    assert (precision.param_dtype, precision.compute_dtype) == (param, compute)
    assert precision.scales_loss is scales
