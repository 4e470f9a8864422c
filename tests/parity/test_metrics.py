"""Validation metrics are exact over ranks: two ranks with uneven shares give the numbers of one."""

from pathlib import Path
from typing import Any

import pytest
from metric_ranks import run_case
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "metric_ranks.py"
CASES: dict[str, Any] = {
    "divides": {"num_samples": 96, "micro_batch_size": 8},
    "a last batch of one sample and one of padding": {"num_samples": 33, "micro_batch_size": 4},
    "a rank with padding alone": {"num_samples": 1, "micro_batch_size": 4},
}
NAMES = {"val/loss", "val/accuracy", "val/accuracy_top5", "val/f1", "val/calibration_error"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_ranks(CASES, world_size=2, folder=tmp_path_factory.mktemp("metrics"), worker=WORKER)


@pytest.mark.parametrize("name", CASES)
def test_every_sample_counts_once_whichever_rank_has_it(name: str, results: dict[str, Any], tmp_path: Path) -> None:
    found, expected = results[name], run_case(CASES[name], tmp_path)
    assert "error" not in found, found["error"]
    assert set(found) == set(expected) == NAMES
    for counted in ("val/accuracy", "val/accuracy_top5", "val/f1"):
        assert found[counted] == expected[counted], counted
    for added in ("val/loss", "val/calibration_error"):  # float32 terms in another order
        assert found[added] == pytest.approx(expected[added], rel=1e-6), added


def test_the_metrics_are_those_of_these_logits(results: dict[str, Any]) -> None:
    found = results["divides"]
    assert 0.1 < found["val/f1"] < found["val/accuracy"] + 0.1 < found["val/accuracy_top5"] < 1.0
