"""What a precision means for torch and DeepSpeed; initial weights are the same for all of them, rounded."""

from pathlib import Path

import pytest
import torch
from support import composed_config, resolved

from recipes.build import build
from recipes.precision import Precision, to_deepspeed_config


@pytest.mark.parametrize(
    ("name", "param", "compute", "reduce", "scales"),
    [
        ("32-true", torch.float32, torch.float32, torch.float32, False),
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.float32, False),
        ("16-mixed", torch.float32, torch.float16, torch.float32, True),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_each_option_has_three_dtypes(
    name: str, param: torch.dtype, compute: torch.dtype, reduce: torch.dtype, scales: bool
) -> None:
    precision = Precision(name=composed_config(f"precision={name}")["precision"]["name"])
    dtypes = (precision.param_dtype, precision.compute_dtype, precision.reduce_dtype)
    assert dtypes == (param, compute, reduce)
    assert precision.scales_loss is scales
    assert precision.is_mixed is (param != compute)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("32-true", None), ("bf16-mixed", "bfloat16"), ("16-mixed", "float16"), ("bf16-true", None)],
)
def test_deepspeed_is_given_autocast_for_mixed_precisions_only(name: str, dtype: str | None) -> None:
    config = to_deepspeed_config(Precision(name=name))  # type: ignore[arg-type]
    assert (config["torch_autocast"]["dtype"] if config else None) == dtype


def test_bf16_true_weights_are_the_rounded_float32_ones(tmp_path: Path) -> None:
    weights = []
    for name in ("32-true", "bf16-true"):
        run = build(resolved(composed_config(f"precision={name}"), tmp_path))
        run.task.trainer = run.trainer
        with run.trainer.precision_plugin.module_init_context():  # as Lightning does
            run.task.configure_model()
        weights.append(dict(run.task.named_parameters()))
    assert weights[1]["model.embedding.weight"].dtype == torch.bfloat16
    for name, full in weights[0].items():
        assert torch.equal(full.bfloat16(), weights[1][name]), name
