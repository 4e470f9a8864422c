"""ZClip against its arithmetic written out in Python floats."""

import math
import random
import statistics

import pytest
import torch

from recipes.clipping.zclip import ZClip


def limits(clipping: ZClip, norms: list[float]) -> list[float]:
    return [float(clipping.limit(torch.tensor(norm))) for norm in norms]


def expected_limits(norms: list[float], *, decay: float, z_score: float, warmup_steps: int) -> list[float]:
    first = norms[:warmup_steps]
    mean, variance = statistics.fmean(first), statistics.pvariance(first)
    found = [math.inf] * warmup_steps
    for norm in norms[warmup_steps:]:
        deviation = math.sqrt(variance) + 1e-6
        score = (norm - mean) / deviation
        limit = mean + z_score**2 / score * deviation if score > z_score else math.inf
        found.append(limit)
        observed = min(norm, limit)
        variance = decay * variance + (1 - decay) * (observed - mean) ** 2
        mean = decay * mean + (1 - decay) * observed
    return found


def test_limits_equal_the_formulas_of_the_paper() -> None:
    rng = random.Random(0)
    norms = [abs(rng.gauss(1.0, 0.1)) * (8.0 if step % 40 == 39 else 1.0) for step in range(300)]
    found = limits(ZClip(decay=0.97, z_score=2.5, warmup_steps=25), norms)
    expected = expected_limits(norms, decay=0.97, z_score=2.5, warmup_steps=25)
    # float32 norms against float64 ones
    assert found == pytest.approx(expected, rel=1e-5)
    assert sum(limit < math.inf for limit in found) >= 7


def test_norms_that_are_not_finite_do_not_enter_the_averages() -> None:
    norms = [1.0 + 0.01 * (step % 7) for step in range(60)]
    with_holes = [*norms[:10], math.inf, *norms[10:40], math.nan, *norms[40:]]
    clipping = ZClip(decay=0.97, z_score=2.5, warmup_steps=25)
    found = limits(clipping, with_holes)
    assert all(not math.isnan(limit) for index, limit in enumerate(found) if index != 41)
    assert math.isfinite(float(clipping.limit(torch.tensor(50.0))))
    assert float(clipping.limit(torch.tensor(1.03))) == math.inf


@pytest.mark.parametrize("at", [10, 25, 80])
def test_a_restored_state_gives_the_same_limits(at: int) -> None:
    rng = random.Random(1)
    norms = [abs(rng.gauss(1.0, 0.3)) for _ in range(120)]
    uninterrupted = ZClip(decay=0.97, z_score=2.5, warmup_steps=25)
    expected = limits(uninterrupted, norms)
    first, second = (ZClip(decay=0.97, z_score=2.5, warmup_steps=25) for _ in range(2))
    limits(first, norms[:at])
    second.load_state_dict(first.state_dict())
    assert limits(second, norms[at:]) == expected[at:]
