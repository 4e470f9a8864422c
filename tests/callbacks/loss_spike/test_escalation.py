"""Which rung follows which, by counts alone."""

import pytest

from callbacks.loss_spike.escalation import SpikeEscalation


def ladder(**changes: int) -> SpikeEscalation:
    rules = {"max_skips": 2, "skip_window": 10, "cooldown_steps": 20, "max_rollbacks": 2}
    return SpikeEscalation(**rules | changes)


def climb(one: SpikeEscalation, steps: str) -> list[str]:
    """s: a refused step, d: a drift, .: a quiet step."""
    return [one.step(refused=what == "s", drifts=what == "d") for what in steps]


def test_skips_then_a_rollback_then_one_with_a_smaller_rate_then_the_end() -> None:
    one = ladder()
    assert climb(one, "sss") == ["skip", "skip", "rollback"]
    assert climb(one, "...d") == ["none", "none", "none", "rollback_and_cut"]
    assert climb(one, "d") == ["stop"]
    assert one.counts.skipped_steps == 3
    assert one.counts.rollbacks == 2


def test_skips_far_apart_are_forgotten() -> None:
    one = ladder()
    assert set(climb(one, "s........." * 10)) == {"skip", "none"}
    assert one.counts.skipped_steps == 10


def test_after_a_cool_down_the_ladder_begins_anew() -> None:
    one = ladder()
    assert climb(one, "d" + "." * 21 + "d" + "." * 21 + "d")[::22] == ["rollback"] * 3
    assert one.counts.rollbacks == 3


@pytest.mark.parametrize("at", range(1, 12))
def test_it_counts_on_from_its_state(at: int) -> None:
    steps = "s.s.ds..sssd"
    expected = climb(ladder(), steps)
    first, second = ladder(), ladder()
    climb(first, steps[:at])
    second.load_state_dict(first.state_dict())
    assert climb(second, steps[at:]) == expected[at:]
    assert second.counts.clock == len(steps)


def test_a_cap_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="max_rollbacks=0"):
        ladder(max_rollbacks=0)
