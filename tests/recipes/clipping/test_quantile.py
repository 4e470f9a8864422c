"""The limit is a quantile of the norms in the window, not counting the current step."""

import math

import numpy as np
import torch

from recipes.clipping.quantile import Quantile


def test_the_limit_is_numpys_quantile_of_the_last_norms() -> None:
    norms = np.random.default_rng(0).lognormal(size=60).astype(np.float32)
    clipping = Quantile(quantile=0.9, window=20, warmup_steps=5)
    for step, norm in enumerate(norms):
        limit = float(clipping.limit(torch.tensor(norm)))
        before = norms[max(0, step - 20) : step]
        expected = np.inf if step < 5 else np.quantile(before, 0.9)
        # both interpolate, in float32 and float64
        assert math.isclose(limit, expected, rel_tol=1e-6), step


def test_an_infinite_norm_does_not_count_and_the_state_can_be_restored() -> None:
    clipping = Quantile(quantile=0.5, window=4, warmup_steps=1)
    for norm in (1.0, math.inf, 3.0):
        clipping.limit(torch.tensor(norm))
    other = Quantile(quantile=0.5, window=4, warmup_steps=1)
    other.load_state_dict(clipping.state_dict())
    assert float(other.limit(torch.tensor(9.0))) == 2.0
    assert float(clipping.limit(torch.tensor(9.0))) == 2.0
