"""SimCLR has one curve, whatever the engine and the split: every view is compared with those of the global batch."""

from typing import Any

import pytest
from cases import COMMON, ENGINES, NUM_STEPS, largest_difference, shortened
from ranks import run_on_ranks

ON_TWO = ["ddp", "fsdp", "fsdp, gradient sync per step", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, offload"]


def of_views(strategy: str, *, accumulate: int, world_size: int) -> dict[str, Any]:
    """Return the experiment on images of which some are not compared."""
    return {
        "overrides": [
            *("model=resnet18", "model._target_=loss_cases.Pixels", "~model.small_images", "data=random_images"),
            *("task=contrastive", "task.hidden_size=16", "task.projection_size=8", "optimizer.lr=1e-2"),
            *COMMON,
            *ENGINES[strategy],
            f"micro_batch_size={16 // accumulate // world_size}",
            f"trainer.devices={world_size}",
        ],
        "data": {"_target_": "loss_cases.TwoViews", "num_samples": 50},
    }


def make_cases(strategies: list[str], *, splits: tuple[int, ...], world_size: int) -> dict[str, Any]:
    return {
        f"{strategy} x{accumulate}": of_views(strategy, accumulate=accumulate, world_size=world_size)
        for strategy in strategies
        for accumulate in splits
    }


ON_ONE = make_cases(["single"], splits=(1, 2, 4), world_size=1)
RANKS = shortened(
    make_cases(ON_TWO, splits=(1, 2, 4), world_size=2),
    *("ddp x2", "fsdp x1", "fsdp, gradient sync per step x4", "ZeRO-2 x2", "ZeRO-3 x4"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of all cases by name."""
    found: dict[str, Any] = {}
    for cases, world_size in ((ON_ONE, 1), (RANKS, 2)):
        found |= run_on_ranks(cases, world_size=world_size, folder=tmp_path_factory.mktemp("contrastive"))
    return found


def test_the_curve_is_that_of_one_batch_on_one_device(results: dict[str, Any]) -> None:
    expected = results["single x1"]["rows"]
    assert 0 < expected[-1]["train/pretext_accuracy"] < 1
    for name, result in results.items():
        assert "error" not in result, (name, result["error"])
        rows = result["rows"]
        assert len(rows) == NUM_STEPS
        differences = largest_difference(rows, expected)
        # float32 sums in another order
        assert differences["train/loss"] < 1e-5, (name, differences)
        assert differences["grad/norm"] < 1e-4, (name, differences)
        for key in ("pretext_accuracy", "alignment", "uniformity"):
            for row, other in zip(rows, expected, strict=True):
                assert row[f"train/{key}"] == pytest.approx(other[f"train/{key}"], rel=1e-5), (name, key)
        for key, value in expected[-1].items():
            if key.startswith("val/"):
                assert rows[-1][key] == pytest.approx(value, rel=1e-5), (name, key)
