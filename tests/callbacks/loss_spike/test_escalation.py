"""Which response follows which, from counts alone."""

import pytest

from callbacks.loss_spike.escalation import SpikeEscalation


def make(**changes: int) -> SpikeEscalation:
    rules = {"max_skips": 2, "skip_window": 10, "cooldown_steps": 20, "max_rollbacks": 2}
    return SpikeEscalation(**rules | changes)


def run(escalation: SpikeEscalation, steps: str) -> list[str]:
    """Return the response to each step; s: a skipped step, d: a drift, .: a quiet step."""
    return [escalation.step(skipped=kind == "s", drifts=kind == "d") for kind in steps]


def test_skips_then_a_rollback_then_one_with_a_backoff_then_a_stop() -> None:
    escalation = make()
    assert run(escalation, "sss") == ["skip", "skip", "rollback"]
    assert run(escalation, "...d") == ["none", "none", "none", "rollback_and_backoff"]
    assert run(escalation, "d") == ["stop"]
    assert escalation.counts.skipped_steps == 3
    assert escalation.counts.rollbacks == 2


def test_skips_far_apart_are_forgotten() -> None:
    escalation = make()
    assert set(run(escalation, "s........." * 10)) == {"skip", "none"}
    assert escalation.counts.skipped_steps == 10


def test_after_the_cooldown_escalation_starts_over() -> None:
    escalation = make()
    assert run(escalation, "d" + "." * 21 + "d" + "." * 21 + "d")[::22] == ["rollback"] * 3
    assert escalation.counts.rollbacks == 3


@pytest.mark.parametrize("at", range(1, 12))
def test_the_state_survives_a_round_trip(at: int) -> None:
    steps = "s.s.ds..sssd"
    expected = run(make(), steps)
    first, second = make(), make()
    run(first, steps[:at])
    second.load_state_dict(first.state_dict())
    assert run(second, steps[at:]) == expected[at:]
    assert second.counts.clock == len(steps)


def test_zero_rollbacks_are_an_error() -> None:
    with pytest.raises(ValueError, match="max_rollbacks=0"):
        make(max_rollbacks=0)
