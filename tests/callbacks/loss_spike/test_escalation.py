"""Which response follows which, from counts alone."""

from typing import Any

import pytest

from callbacks.loss_spike.escalation import SpikeEscalation


def make(**changes: Any) -> SpikeEscalation:
    rules = {"max_skips": 2, "max_non_finite": 3, "window_steps": 10, "cooldown_steps": 20, "max_rollbacks": 2}
    return SpikeEscalation(**{"action": "rollback", **rules, **changes})


def run(escalation: SpikeEscalation, steps: str) -> list[str]:
    """Return the response to each step.

    s: a skipped outlier, a: an applied one, n: not finite, o: an overflow of a scaler, d: a drift, .: a quiet step.
    """
    return [
        escalation.step(
            skipped=kind in "sno",
            outlier=kind in "sa",
            non_finite=kind == "n",
            overflowed=kind == "o",
            drifts=kind == "d",
        )
        for kind in steps
    ]


def test_skips_then_a_rollback_then_one_with_a_backoff_then_a_stop() -> None:
    escalation = make()
    assert run(escalation, "sss") == ["skip", "skip", "rollback"]
    assert run(escalation, "...d") == ["none", "none", "none", "rollback_and_backoff"]
    assert run(escalation, "d") == ["stop"]
    assert escalation.counts.skipped_steps == 3
    assert escalation.counts.rollbacks == 2


def test_outliers_far_apart_are_forgotten() -> None:
    escalation = make()
    assert set(run(escalation, "s........." * 10)) == {"skip", "none"}
    assert escalation.counts.skipped_steps == 10


def test_outliers_with_normal_steps_between_them_roll_back_within_the_window() -> None:
    assert run(make(), "s..s....s")[-1] == "rollback"


@pytest.mark.parametrize(("action", "last"), [("rollback", "rollback"), ("skip", "stop"), ("warn", "stop")])
def test_steps_that_are_not_finite_are_skipped_unless_too_many_follow_each_other(action: str, last: str) -> None:
    escalation = make(action=action)
    assert set(run(escalation, "nnn." * 30)) == {"skip", "none"}
    assert run(escalation, "nnnn") == ["skip"] * 3 + [last]


def test_steps_that_are_not_finite_do_not_count_as_outliers() -> None:
    assert run(make(), "snsns") == ["skip"] * 4 + ["rollback"]


@pytest.mark.parametrize("action", ["warn", "skip"])
def test_without_rollbacks_a_new_level_is_learned_instead(action: str) -> None:
    escalation = make(action=action)
    assert run(escalation, "sss") == ["skip", "skip", "relearn"]
    assert run(escalation, "ss.d" * 20).count("relearn") == 20
    assert escalation.counts.rollbacks == 0


def test_overflows_of_a_loss_scaler_count_as_nothing_but_put_off_snapshots() -> None:
    escalation = make()
    assert run(escalation, "nno" + "o" * 30 + "n") == ["skip"] * 34
    assert not escalation.is_quiet
    assert run(escalation, "n") == ["rollback"]
    assert run(escalation, "o.") == ["skip", "none"]
    assert escalation.is_quiet
    assert escalation.counts.skipped_steps == 36


def test_repair_rolls_back_what_lasts_but_not_what_the_restored_weights_show_too() -> None:
    escalation = make(action="repair", cooldown_steps=40)
    assert run(escalation, "a" * 20) == ["none"] * 20
    assert run(escalation, "d") == ["rollback"]
    assert run(escalation, "." * 16 + "d")[-1] == "rollback_and_backoff"
    assert run(escalation, "." * 15 + "d")[-1] == "relearn"  # as soon as the detector can know
    assert run(escalation, "." * 20 + "d")[-1] == "relearn"  # a third rollback in a row would be one too many
    assert run(escalation, "nnnn")[-1] == "stop"


def test_a_snapshot_waits_until_outliers_are_as_old_as_the_quarantine() -> None:
    escalation = make()
    quiet = []
    for kind in "..s" + "." * 11 + "n.":
        run(escalation, kind)
        quiet.append(escalation.is_quiet)
    assert quiet == [True] * 2 + [False] * 10 + [True] * 2 + [False, True]


def test_after_the_cooldown_escalation_starts_over() -> None:
    escalation = make()
    assert run(escalation, "d" + "." * 21 + "d" + "." * 21 + "d")[::22] == ["rollback"] * 3
    assert escalation.counts.rollbacks == 3


@pytest.mark.parametrize("at", range(1, 12))
def test_the_state_survives_a_round_trip(at: int) -> None:
    steps = "s.n.dns.sssd"
    expected = run(make(), steps)
    first, second = make(), make()
    run(first, steps[:at])
    second.load_state_dict(first.state_dict())
    assert run(second, steps[at:]) == expected[at:]
    assert second.counts.clock == len(steps)


def test_zero_rollbacks_are_an_error() -> None:
    with pytest.raises(ValueError, match="max_rollbacks=0"):
        make(max_rollbacks=0)
