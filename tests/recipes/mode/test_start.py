"""The lines printed before the first step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.mesh import Mesh
from recipes.mode.start import header


class FakeRun:
    """A run on a device, at step 7."""

    def __init__(self, device: str) -> None:
        strategy = SimpleNamespace(mesh=Mesh(), data_size=1, num_micro_batches=1, pipeline=None)
        self.trainer = SimpleNamespace(world_size=1, max_steps=10, global_step=7, strategy=strategy)
        self.accumulation = SimpleNamespace(global_batch_size=8, num_micro_batches=1)
        empty: dict[str, Any] = {"parameters": list, "named_parameters": list}
        known = {
            "model_name": "GPT2",
            "whole_model": None,
            "model": torch.nn.Identity(),
            "first_weights": None,
            "group_rows": [],
        }
        self.has_own_training = False
        self.task = SimpleNamespace(device=torch.device(device), **known, **empty)
        self.data = SimpleNamespace(describe_epochs=lambda num_samples: f"{num_samples / 80:.3g} epochs")
        self.precision = SimpleNamespace(name="bf16-mixed", scales_loss=False)


@pytest.mark.parametrize(
    ("device", "deterministic", "is_told"),
    [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)],
)
def test_a_run_resumed_on_a_gpu_is_told_what_the_same_bits_take(
    device: str, deterministic: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    run: Any = FakeRun(device)
    lines = list(header(run, resumed_from=Path("run/checkpoints/step_0000007.ckpt")))
    assert lines[2] == "resumed from run/checkpoints/step_0000007.ckpt at step 7"
    assert ["trainer.deterministic=true" in line for line in lines[3:]] == [True] * is_told
    assert not any("deterministic" in line for line in header(run, resumed_from=None))


@pytest.mark.parametrize(("precision", "has_units", "is_told"), [("32-true", True, True), ("32-true", False, False)])
def test_a_processor_with_matrix_units_says_so_to_a_float32_run(
    precision: str, has_units: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_units})
    run: Any = FakeRun("cpu")
    assert not any("AMX" in line for line in header(run, resumed_from=None)), "it computes in bfloat16 already"
    run.precision.name = precision
    assert any("AMX" in line for line in header(run, resumed_from=None)) is is_told
