"""Symptoms of policies: each on drawn curves that show it, beside a real run that learned, which shows none."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from callbacks.diagnosis.diagnose import Diagnosis, examine
from callbacks.diagnosis.read import read_run
from callbacks.diagnosis.run import make_run

STEPS = 120
LEARNED = Path(__file__).with_name("policy_metrics.csv")  # GRPO on an ordering task, 60 steps: from 0.4 to 1.0


def noise(width: float, *, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(0, width) for _ in range(STEPS)]


def moving(start: float, end: float, width: float = 0.0, *, seed: int = 0) -> list[float]:
    """Return values that go from one to the other within the first half."""
    return [start + (end - start) * min(1.0, 2 * step / STEPS) + n for step, n in enumerate(noise(width, seed=seed))]


def validated(values: Sequence[float]) -> list[float]:
    """Return a column with these validations, one every 20 steps."""
    return [values[step // 20] if step % 20 == 19 else math.nan for step in range(STEPS)]


HEALTHY = {
    "train/loss": noise(0.004),
    "grad/norm": [1.0 + n for n in noise(0.2)],
    "reward/mean": moving(0.4, 0.95, 0.02),
    "reward/no_spread_fraction": moving(0.1, 0.7, 0.03),
    "reward/errors": [0.0] * STEPS,
    "rollout/tokens_mean": moving(120, 140, 4),
    "rollout/truncated_fraction": moving(0.02, 0.04),
    "policy/entropy": moving(0.2, 0.05, 0.005),
    "policy/clipped_fraction": [0.02] * STEPS,
    "rollout/logprob_gap": [1e-3] * STEPS,
    "val/reward": validated([0.5, 0.7, 0.8, 0.9, 0.93, 0.94]),
    "val/exact_match": validated([0.5, 0.7, 0.8, 0.9, 0.93, 0.94]),
}


def look(columns: Mapping[str, Sequence[float]], **arguments: Any) -> Diagnosis:
    points = {
        name: [(step, value) for step, value in enumerate(values, start=1) if not math.isnan(value)]
        for name, values in columns.items()
    }
    return examine(make_run(points, folder=Path("run"), **arguments))


def names(columns: Mapping[str, Sequence[float]], **arguments: Any) -> list[str]:
    return [finding.name for finding in look(HEALTHY | columns, **arguments).findings]


def test_a_policy_that_learns_has_no_finding_though_its_loss_stays_at_0() -> None:
    assert names({}) == []
    assert examine(read_run(LEARNED)).findings == []


@pytest.mark.parametrize("seed", range(10))
def test_a_loss_of_both_signs_is_neither_stuck_nor_divergent_nor_spiky(seed: int) -> None:
    losses = [n if step % 40 else 1.0 for step, n in enumerate(noise(0.004, seed=seed))]
    rising = [value - 0.01 + 0.0005 * step for step, value in enumerate(losses)]
    for loss in (losses, rising, [0.0] * STEPS):
        assert names({"train/loss": loss}, config={"model": {"vocab_size": 2}}) == []
    diagnosis = look(HEALTHY)
    [reason] = [reason for reason, symptoms in diagnosis.not_examined.items() if "nothing_learned" in symptoms]
    assert reason.startswith("the loss of a policy lies around 0")
    assert "bad_batches" in diagnosis.not_examined[reason]


def test_a_policy_whose_loss_is_nan_has_diverged_all_the_same() -> None:
    assert names({"train/loss": [0.0] * (STEPS - 3) + [math.inf] * 3})[0] == "diverged"


def test_groups_without_spread_are_right_wrong_or_some_of_each() -> None:
    still = {"reward/no_spread_fraction": [0.97] * STEPS}
    for level, severity, which in (
        (0.99, "note", "too easy"),
        (0.01, "critical", "too hard"),
        (0.5, "critical", "some prompts are always answered right"),
    ):
        [finding] = look(HEALTHY | still | {"reward/mean": [level] * STEPS}).findings
        assert (finding.name, finding.severity) == ("no_spread", severity)
        assert which in finding.meaning
    [finding] = look(HEALTHY | still | {"reward/mean": [-3.0] * STEPS}).findings
    assert "the same reward" in finding.meaning, "what right is, is unknown"


def test_a_run_of_three_steps_without_any_spread_is_told_so_at_once() -> None:
    columns = {"train/loss": [0.0] * 3, "reward/mean": [0.0] * 3, "reward/no_spread_fraction": [1.0] * 3}
    assert [finding.name for finding in look(columns).findings] == ["no_spread"]


def test_a_reward_that_stays_where_it_began() -> None:
    flat = {"reward/mean": [0.5 + n for n in noise(0.04)], "reward/no_spread_fraction": [0.1] * STEPS}
    assert names(flat) == ["reward_flat"]
    assert names({"reward/mean": [0.97 + n / 4 for n in noise(0.04)]}) == [], "nothing is left to learn"
    assert names({"reward/mean": [0.1 + n for n in noise(0.3)]}) == [], "its noise may hide what it learned"


def test_completions_that_grow_without_more_reward() -> None:
    growing = {"rollout/tokens_mean": moving(100, 230, 5), "rollout/truncated_fraction": moving(0.05, 0.8)}
    assert names(growing) == [], "the reward pays for them"
    wrong = {"reward/mean": moving(0.5, 0.4, 0.02)}
    assert "completions_growing" in names(growing | wrong)
    assert "completions_growing" not in names({"rollout/tokens_mean": moving(100, 230, 5)} | wrong), "all have an end"


def test_an_entropy_that_vanishes_before_the_reward_is_high() -> None:
    collapsed = {"policy/entropy": moving(0.5, 0.01)}
    assert names(collapsed) == [], "the answers are right, and certain"
    assert names(collapsed | {"reward/mean": moving(0.3, 0.6, 0.02)}) == ["entropy_collapsed"]
    assert names({"reward/mean": moving(0.3, 0.6, 0.02)}) == []


@pytest.mark.parametrize("column", ["val/reward", "val/exact_match"])
def test_held_out_answers_that_get_worse_while_the_reward_rises(column: str) -> None:
    worse = {column: validated([0.5, 0.7, 0.72, 0.6, 0.45, 0.3])}
    assert names(worse) == ["reward_hacked"]
    assert "reward_hacked" not in names(worse | {"reward/mean": moving(0.9, 0.3, 0.01)}), "training gets worse, too"
    assert names({column: validated([0.5, 0.7, 0.72, 0.69, 0.71, 0.7])}) == [], "that is noise"


def test_a_gap_between_sampler_and_model_that_grows_or_is_large() -> None:
    assert names({"rollout/logprob_gap": moving(1e-3, 0.06)}) == ["sampler_disagrees"]
    assert names({"rollout/logprob_gap": [0.3] * STEPS}) == ["sampler_disagrees"]
    assert names({"rollout/logprob_gap": [0.03] * STEPS}) == [], "bfloat16 has such a gap from the start"


def test_ratios_of_which_a_third_are_clipped() -> None:
    assert names({"policy/clipped_fraction": [0.5] * STEPS}) == ["ratios_clipped"]


def test_reward_functions_that_fail_and_their_share_of_all_completions() -> None:
    errors = {"reward/errors": [4.0 if step % 10 == 0 else 0.0 for step in range(STEPS)]}
    [finding] = look(HEALTHY | errors, config={"global_batch_size": 16}).findings
    assert (finding.name, finding.severity) == ("reward_fails", "warning")
    assert finding.evidence[1].value == pytest.approx(4 * 12 / (16 * STEPS))
    [finding] = look(HEALTHY | errors, config={"global_batch_size": 4096}).findings
    assert finding.severity == "note"


def test_a_policy_whose_validation_comes_after_its_end_lacks_a_held_out_reward() -> None:
    columns = {name: values for name, values in HEALTHY.items() if not name.startswith("val/")}
    [finding] = look(columns, config={"eval_every": 1000}, status="finished").findings
    assert finding.name == "never_validated"
    assert finding.meaning.startswith("there is no held-out reward")


def test_the_columns_of_trl_are_read() -> None:
    columns = {
        "loss": [0.0] * STEPS,
        "reward": [0.5 + n for n in noise(0.02)],
        "frac_reward_zero_std": [1.0] * STEPS,
        "clip_ratio/region_mean": [0.6] * STEPS,
    }
    assert {finding.name for finding in look(columns).findings} == {"no_spread", "ratios_clipped"}
