"""A norm that vanishes and one that keeps rising cause one warning each."""

from callbacks.grad_norm.callback import NormTrend


def get_warnings(norms: list[float]) -> list[tuple[int, str]]:
    trend = NormTrend(vanishing=1e-7, rising=30.0)
    found = [(step, trend.observe(norm)) for step, norm in enumerate(norms)]
    return [(step, line) for step, line in found if line is not None]


def test_a_vanishing_norm_warns_once_and_again_after_it_has_recovered() -> None:
    lines = get_warnings([1.0] * 3 + [1e-9] * 5 + [1.0] + [1e-9] * 2)
    assert [step for step, _ in lines] == [3, 9]
    assert "vanished" in lines[0][1]


def test_a_rise_shows_in_the_median_of_fifty() -> None:
    lines = get_warnings([0.5] * 60 + [20.0] * 60)
    assert len(lines) == 1
    step, line = lines[0]
    assert 60 + 24 <= step <= 60 + 26
    assert "risen to 20" in line
    assert "from 0.5" in line


def test_outliers_and_infinities_do_not_count_as_a_rise() -> None:
    norms = [1.0 + 0.1 * (step % 5) for step in range(300)]
    norms[100:300:7] = [1000.0] * len(norms[100:300:7])
    norms[150] = float("inf")
    assert get_warnings(norms) == []


def test_the_state_survives_a_round_trip() -> None:
    first, second = (NormTrend(vanishing=1e-7, rising=30.0) for _ in range(2))
    for _ in range(60):
        first.observe(1.0)
    second.load_state_dict(first.state_dict())
    lines = [second.observe(100.0) for _ in range(40)]
    assert sum(line is not None for line in lines) == 1
