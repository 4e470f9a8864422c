"""The check of GPU indices, which an end-to-end test reaches only on a machine with GPUs."""

from typing import Any

import pytest
from support import resolved

from recipes.config import compose_and_check
from recipes.config.check.strategy import check_strategy, find_rate_of_another_optimizer


def _config(devices: list[int]) -> dict[str, Any]:
    return {
        "mode": {"_target_": "recipes.mode.fit.fit"},
        "strategy": {
            "_target_": "recipes.strategy.deepspeed.strategy.DeepSpeedZero",
            "stage": 1,
            "offload_optimizer": None,
            "offload_parameters": None,
            "nvme_path": None,
        },
        "trainer": {"devices": devices},
        "model": {"_target_": "recipes.model.gpt2.GPT2"},
        "optimizer": {"_target_": "recipes.optimizer.adamw.adamw"},
    }


@pytest.mark.parametrize("devices", [[0], [0, 1], [1, 0]])
def test_deepspeed_accepts_gpu_indices_that_start_at_zero(devices: list[int]) -> None:
    assert list(check_strategy(resolved(_config(devices)))) == []


def test_other_gpu_indices_suggest_cuda_visible_devices() -> None:
    [mistake] = check_strategy(resolved(_config([1, 2])))
    assert str(mistake) == (
        "trainer.devices=[1,2] strategy=deepspeed_stage_1: DeepSpeed counts the GPUs it sees from 0;"
        " type CUDA_VISIBLE_DEVICES=1,2 python train.py … trainer.devices=2"
    )


_REASON = "it updates parameters individually, but DeepSpeed passes one flat shard of all parameters"


@pytest.mark.parametrize("option", ["muon", "adafactor"])
@pytest.mark.parametrize("mode", ["fit", "plan", "lr_find"])
def test_an_optimizer_of_matrices_is_rejected_under_zero(option: str, mode: str) -> None:
    _, [mistake] = compose_and_check([f"optimizer={option}", "strategy=deepspeed_stage_2", f"mode={mode}"])
    assert str(mistake) == (
        f"optimizer={option} strategy=deepspeed_stage_2: {_REASON}; type strategy=fsdp, or strategy=ddp"
    )


def test_with_offload_the_alternative_offloads_too() -> None:
    _, [mistake] = compose_and_check(["optimizer=muon", "strategy=deepspeed_stage_3_offload"])
    assert str(mistake) == (
        f"optimizer=muon strategy=deepspeed_stage_3: {_REASON}; type strategy=fsdp strategy.cpu_offload=true"
    )


@pytest.mark.parametrize("overrides", [["optimizer=lion", "strategy=deepspeed_stage_1"], ["optimizer=muon"]])
def test_an_optimizer_of_single_elements_or_another_engine_is_accepted(overrides: list[str]) -> None:
    _, mistakes = compose_and_check(overrides)
    assert mistakes == []


def test_an_average_for_validation_is_the_reason_against_zero() -> None:
    _, [mistake] = compose_and_check(["optimizer=schedule_free", "strategy=deepspeed_stage_2"])
    assert str(mistake) == (
        "optimizer=schedule_free strategy=deepspeed_stage_2: a validation exchanges the weights for their average, and"
        " DeepSpeed computes with weights of its own; type strategy=fsdp, or strategy=ddp"
    )


@pytest.mark.parametrize(
    ("typed", "warning"),
    [
        (
            "optimizer=sgd",
            "optimizer=sgd: it trains at optimizer.lr=0.003, which the recipe sets for its own optimizer;"
            " type optimizer.lr=0.1, the rate of conf/optimizer/sgd.yaml",
        ),
        ("optimizer=sgd optimizer.lr=0.1", None),
        ("recipe=single_fp32 optimizer=sgd", None),  # this recipe sets no rate
        ("optimizer.lr=0.1", None),
    ],
)
def test_a_typed_optimizer_at_the_rate_of_the_recipe_is_warned_about(typed: str, warning: str | None) -> None:
    composed, mistakes = compose_and_check(typed.split())
    assert composed is not None
    assert mistakes == []
    assert [str(found) for found in find_rate_of_another_optimizer(composed)] == ([] if warning is None else [warning])
