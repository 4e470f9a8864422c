"""Symptoms on drawn curves: those that no short run shows, and the limits of the others."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from callbacks.diagnosis.diagnose import CATALOGUE, examine
from callbacks.diagnosis.finding import Finding
from callbacks.diagnosis.run import make_run

STEPS = 400


def find(columns: Mapping[str, Sequence[float]], **arguments: Any) -> list[Finding]:
    points = {name: list(enumerate(values, start=1)) for name, values in columns.items()}
    return list(examine(make_run(points, folder=Path("run"), **arguments)).findings)


def names(columns: Mapping[str, Sequence[float]], **arguments: Any) -> list[str]:
    return [finding.name for finding in find(columns, **arguments)]


def noise(width: float, *, seed: int = 0, count: int = STEPS) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(0, width) for _ in range(count)]


def falling(width: float = 0.05, *, start: float = 4.0, end: float = 2.0, seed: int = 0) -> list[float]:
    """Return a loss that falls as healthy ones do."""
    return [end + (start - end) * math.exp(-step / 60) + n for step, n in enumerate(noise(width, seed=seed))]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("width", [0.005, 0.05, 0.3])
def test_a_falling_loss_has_no_finding_whatever_its_noise(width: float, seed: int) -> None:
    norms = [1 + n for n in noise(0.1, seed=seed + 100)]
    epochs = [step // 50 for step in range(STEPS)]
    val = [value if step % 20 == 19 else math.nan for step, value in enumerate(falling(0.02, seed=seed + 200))]
    speeds = [1000 * (1 + n) for n in noise(0.1, seed=seed + 300)]
    columns = {"train/loss": falling(width, seed=seed), "grad/norm": norms, "epoch": epochs, "val/loss": val}
    assert names(columns | {"throughput/tokens_per_second": speeds, "lr": [1e-3] * STEPS}) == []


def test_a_norm_that_grows_while_the_loss_stands_still() -> None:
    norms = [math.exp(max(0, step - 100) / 100) * (1 + n) for step, n in enumerate(noise(0.1))]
    loss = falling(start=3.2, end=3.0)
    assert names({"train/loss": loss, "grad/norm": norms}) == ["gradient_norm_rising"]
    still_falling = [4 - 0.005 * step + n for step, n in enumerate(noise(0.05))]
    assert names({"train/loss": still_falling, "grad/norm": norms}) == []


def test_a_norm_that_grows_at_the_start_only_is_that_of_a_network_that_learns() -> None:
    norms = [2 - math.exp(-step / 20) + n for step, n in enumerate(noise(0.05))]
    assert names({"train/loss": falling(), "grad/norm": norms}) == []


def test_skipped_steps_and_rollbacks_are_counted() -> None:
    skipped = [0] * 300 + [9] * 100
    [finding] = find({"train/loss": falling(), "spike/skipped_steps": skipped})
    assert (finding.name, finding.evidence[0].value) == ("steps_lost", 9)
    assert names({"train/loss": falling(), "spike/skipped_steps": [0] * 399 + [1]}) == []
    events = [{"event": "rollback", "step": 130}, {"event": "rollback", "step": 260}]
    [finding] = find({"train/loss": falling()}, events=events)
    assert str(finding.evidence[0]) == "rollbacks 2 at steps 130 to 260"


def test_a_single_nan_in_between_is_a_lost_step_and_one_at_the_end_is_not_yet_a_divergence() -> None:
    loss = falling()
    loss[200] = math.nan
    assert names({"train/loss": loss}) == ["steps_lost"]
    loss[200] = 2.0
    loss[-1] = math.nan
    assert names({"train/loss": loss}) == []
    loss[-3:] = [math.nan, math.inf, math.nan]
    [finding] = find({"train/loss": loss})
    assert (finding.name, finding.evidence[-1].first_step) == ("diverged", 398)


def test_a_rise_for_good_is_a_divergence_and_a_small_one_is_not() -> None:
    rising = [value + (1.5 if step > 250 else 0) for step, value in enumerate(falling())]
    assert names({"train/loss": rising})[0] == "diverged"
    drifting = [value + (0.15 if step > 250 else 0) for step, value in enumerate(falling())]
    assert names({"train/loss": drifting}) == []


def test_validations_without_a_value_and_planned_after_the_end() -> None:
    empty = {"train/loss": falling(), "val/loss": [math.nan] * STEPS}
    assert names(empty) == ["never_validated"]
    config = {"eval_every": 1000}
    assert names({"train/loss": falling()}, config=config, status="finished") == ["never_validated"]
    for status in (None, "running"):
        assert names({"train/loss": falling()}, config=config, status=status) == []
    assert names({"train/loss": falling()}, config={"eval_every": 50}, status="finished") == []


def test_a_frozen_network_is_told_by_its_gradient_and_one_without_a_rate_by_its_rate() -> None:
    loss = [7.6 + n for n in noise(0.01)]
    [frozen] = find({"train/loss": loss, "grad/norm": [0.0] * STEPS})
    assert frozen.causes[0].text.startswith("no gradient reaches the weights")
    [still] = find({"train/loss": loss, "lr": [0.0] * STEPS})
    assert still.causes[0].text.startswith("the learning rate is zero")


def test_a_loss_whose_noise_hides_whether_it_fell_is_not_called_stuck() -> None:
    assert names({"train/loss": [2.0 + n for n in noise(0.5)]}) == []
    assert names({"train/loss": [2.0 + n for n in noise(0.01)]}) == ["nothing_learned"]


def test_a_uniform_guess_needs_the_number_of_classes() -> None:
    loss = falling(0.005, start=4.0, end=math.log(10))
    assert names({"train/loss": loss}) == []
    assert names({"train/loss": loss}, config={"model": {"num_classes": 10}}) == ["nothing_learned"]


@pytest.mark.parametrize("role", ["step_seconds", "tokens/s"])
def test_steps_that_become_longer_are_found_by_either_metric_and_a_sudden_change_is_not(role: str) -> None:
    seconds = [1 + step / 1000 + n for step, n in enumerate(noise(0.02))]
    sudden = [(1.4 if step > 200 else 1) + n for step, n in enumerate(noise(0.02))]
    for values, expected in ((seconds, ["slowing_down"]), (sudden, [])):
        column = values if role == "step_seconds" else [1 / value for value in values]
        assert names({"loss": falling(), role: column}) == expected


def test_the_boundaries_of_epochs_come_from_the_column_the_samples_or_an_argument() -> None:
    loss = [3.0 - 0.3 * (step // 50) + n for step, n in enumerate(noise(0.05))]
    assert names({"loss": loss}) == []
    assert names({"loss": loss}, steps_per_epoch=50) == ["memorizing"]
    assert names({"loss": loss, "epoch": [step // 50 for step in range(STEPS)]}) == ["memorizing"]
    samples = {"loss": loss, "train/samples": [8 * (step + 1) for step in range(STEPS)]}
    assert names(samples, config={"data": {"num_samples": 400}}) == ["memorizing"]
    assert names({"loss": loss}, steps_per_epoch=37) == []


def test_the_same_order_in_every_epoch_is_found_from_noise_alone() -> None:
    order = noise(0.1, count=50)
    loss = [value + order[step % 50] for step, value in enumerate(falling(0.05))]
    assert names({"loss": loss}, steps_per_epoch=50) == ["not_shuffled"]
    assert names({"loss": falling(0.15)}, steps_per_epoch=50) == []


def test_findings_are_sorted_by_severity_and_what_is_missing_is_said() -> None:
    loss = [value + (2 if step > 250 else 0) for step, value in enumerate(falling())]
    run = make_run(
        {
            "loss": list(enumerate(loss)),
            "step_time": [(step, 1 + step / 400) for step in range(STEPS)],
            "data_wait_fraction": [(step, 0.5) for step in range(STEPS)],
        },
        folder=Path("run"),
    )
    diagnosis = examine(run)
    assert [finding.severity for finding in diagnosis.findings][:2] == ["critical", "warning"]
    missing = [name for symptoms in diagnosis.not_examined.values() for name in symptoms]
    assert sorted([*diagnosis.examined, *missing]) == sorted(symptom.name for symptom in CATALOGUE)
    assert any("no column val/loss" in reason for reason in diagnosis.not_examined)
    assert any(line.startswith("not checked: overfitting, easier_validation") for line in diagnosis.lines())


def test_chosen_answers_that_become_less_probable_while_the_margin_grows() -> None:
    margin = [step / STEPS + n for step, n in enumerate(noise(0.05))]
    for change, expected in ((-3.0, ["answers_less_probable"]), (3.0, []), (0.0, [])):
        chosen = [-20 + change * step / STEPS + n for step, n in enumerate(noise(1.0, seed=1))]
        columns = {"train/loss": falling(), "train/chosen_log_prob": chosen, "train/margin": margin}
        assert names(columns) == expected, change
    falls = [-20 - 3 * step / STEPS + n for step, n in enumerate(noise(1.0, seed=1))]
    columns = {"train/loss": falling(), "train/chosen_log_prob": falls, "train/margin": [-value for value in margin]}
    assert names(columns) == [], "then it learns something else"


def test_thirty_thousand_rows_take_a_second() -> None:
    loss = noise(0.05, count=30_000)
    columns = {
        "loss": [3 - step / 3e4 + n for step, n in enumerate(loss)],
        "epoch": [s // 5000 for s in range(30_000)],
    }
    val = [3 - step / 3e4 if step % 1000 == 0 else math.nan for step in range(30_000)]
    assert names(columns | {"grad_norm": [1 + n for n in loss], "lr": [1e-3] * 30_000, "val_loss": val}) == []


def test_a_module_with_a_schedule_of_its_own_is_not_told_of_that_of_the_config() -> None:
    columns = {"train/loss": falling(), "lr": [1e-3] * STEPS}
    schedule = {"scheduler": {"num_steps": 10**9}}
    assert names(columns, config=schedule, status="finished") == ["ended_before_decay"]
    own = schedule | {"task": {"module": {"_target_": "mine.Net"}}}
    assert names(columns, config=own, status="finished") == []
