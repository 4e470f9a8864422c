"""A precision word means three dtypes; initial weights are the same draws for all of them."""

from pathlib import Path

import pytest
import torch
from support import composed_config

from recipes.build import build
from recipes.precision import Precision


@pytest.mark.parametrize(
    ("word", "param", "compute", "reduce", "scales"),
    [
        ("32-true", torch.float32, torch.float32, torch.float32, False),
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.float32, False),
        ("16-mixed", torch.float32, torch.float16, torch.float32, True),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_a_word_means_its_dtypes(
    word: str, param: torch.dtype, compute: torch.dtype, reduce: torch.dtype, scales: bool
) -> None:
    precision = Precision(name=composed_config(f"precision={word}")["precision"]["name"])
    dtypes = (precision.param_dtype, precision.compute_dtype, precision.reduce_dtype)
    assert dtypes == (param, compute, reduce)
    assert precision.scales_loss is scales


def test_bf16_true_weights_are_the_rounded_float32_ones(tmp_path: Path) -> None:
    weights = []
    for word in ("32-true", "bf16-true"):
        run = build(composed_config(f"precision={word}"), tmp_path, [])
        run.task.trainer = run.trainer
        with run.trainer.precision_plugin.module_init_context():  # as Lightning does
            run.task.configure_model()
        weights.append(dict(run.task.named_parameters()))
    assert weights[1]["model.embedding.weight"].dtype == torch.bfloat16
    for name, full in weights[0].items():
        assert torch.equal(full.bfloat16(), weights[1][name]), name
