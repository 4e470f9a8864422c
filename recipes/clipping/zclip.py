"""Clipping by the z-score of the norm against moving averages: ZClip (Kumar et al. 2025, arXiv 2504.02507)."""

from typing import Annotated, Any

import torch
from torch import Tensor


class ZClip:
    """A norm that is `z_score` deviations above the average is scaled down, the more the further it is above.

    The reciprocal form of the paper: a score of z becomes z_score^2 / z. What is remembered is the norm after
    clipping, so that an outlier does not raise the bar for the next.

    Args:
        decay: Of the moving averages of norm and variance.
        z_score: Deviations above which a norm is clipped.
        warmup_steps: Steps whose plain mean and variance the averages begin with.
    """

    def __init__(
        self,
        *,
        decay: Annotated[float, "> 0, < 1"],
        z_score: Annotated[float, "> 0"],
        warmup_steps: Annotated[int, ">= 1"],
    ) -> None:
        self._decay = decay
        self._z_score = z_score
        self._warmup_steps = warmup_steps
        self._num_seen = 0
        # number of finite norms, mean, and sum of squared differences, then variance; on the norm's device
        self._count: Tensor = torch.zeros((), dtype=torch.float64)
        self._mean: Tensor = torch.zeros((), dtype=torch.float64)
        self._spread: Tensor = torch.zeros((), dtype=torch.float64)

    def limit(self, norm: Tensor) -> Tensor:
        value = norm.detach().double()
        self._count, self._mean, self._spread = (
            one.to(value.device) for one in (self._count, self._mean, self._spread)
        )
        self._num_seen += 1
        if self._num_seen <= self._warmup_steps:
            self._collect(value)
            return torch.full_like(norm, torch.inf)
        deviation = self._spread.sqrt() + 1e-6
        score = (value - self._mean) / deviation
        clipped = self._mean + self._z_score**2 / score.clamp(min=self._z_score) * deviation
        is_out = score > self._z_score
        remembered = torch.where(is_out, clipped, value)
        finite = remembered.isfinite()
        difference = remembered - self._mean
        spread = self._decay * self._spread + (1 - self._decay) * difference.square()
        mean = self._decay * self._mean + (1 - self._decay) * remembered
        self._spread = torch.where(finite, spread, self._spread)
        self._mean = torch.where(finite, mean, self._mean)
        return torch.where(is_out, clipped, torch.inf).to(norm.dtype)

    def _collect(self, value: Tensor) -> None:
        """Welford's mean and sum of squared differences; the variance once the warm-up is over."""
        finite = value.isfinite()
        count = self._count + finite
        difference = torch.where(finite, value - self._mean, 0.0)
        self._mean = self._mean + difference / count.clamp(min=1)
        rest = torch.where(finite, value - self._mean, 0.0)
        self._spread = self._spread + difference * rest
        self._count = count
        if self._num_seen == self._warmup_steps:
            self._spread = self._spread / count.clamp(min=1)

    def state_dict(self) -> dict[str, Any]:
        numbers = [float(one) for one in (self._count, self._mean, self._spread)]
        return {"num_seen": self._num_seen, "numbers": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_seen = state["num_seen"]
        self._count, self._mean, self._spread = (
            torch.tensor(one, dtype=torch.float64) for one in state["numbers"]
        )
