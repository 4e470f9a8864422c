"""Clip by the z-score of the norm against moving averages: ZClip (Kumar et al. 2025, arXiv 2504.02507)."""

from typing import Annotated, Any

import torch
from torch import Tensor


class ZClip:
    """Clips norms more than `z_score` standard deviations above the average, more strongly for larger outliers.

    Reciprocal variant of the paper: a score of z becomes z_score^2 / z. The averages use the norm after clipping, so
    that an outlier does not raise the next threshold.

    Args:
        decay: EMA decay of the mean and variance of the norm, per optimizer step.
        z_score: Standard deviations above the average at which clipping starts.
        warmup_steps: Optimizer steps without clipping, whose mean and variance start the averages.
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
        # all on the norm's device; `spread` is the sum of squared differences during warm-up, then the variance
        self._count: Tensor = torch.zeros((), dtype=torch.float64)
        self._mean: Tensor = torch.zeros((), dtype=torch.float64)
        self._spread: Tensor = torch.zeros((), dtype=torch.float64)

    def limit(self, norm: Tensor) -> Tensor:
        value = norm.detach().double()
        self._count, self._mean, self._spread = (
            scalar.to(value.device) for scalar in (self._count, self._mean, self._spread)
        )
        self._num_seen += 1
        if self._num_seen <= self._warmup_steps:
            self._collect(value)
            return torch.full_like(norm, torch.inf)
        deviation = self._spread.sqrt() + 1e-6
        score = (value - self._mean) / deviation
        clipped = self._mean + self._z_score**2 / score.clamp(min=self._z_score) * deviation
        is_outlier = score > self._z_score
        observed = torch.where(is_outlier, clipped, value)
        finite = observed.isfinite()
        difference = observed - self._mean
        spread = self._decay * self._spread + (1 - self._decay) * difference.square()
        mean = self._decay * self._mean + (1 - self._decay) * observed
        self._spread = torch.where(finite, spread, self._spread)
        self._mean = torch.where(finite, mean, self._mean)
        return torch.where(is_outlier, clipped, torch.inf).to(norm.dtype)

    def _collect(self, value: Tensor) -> None:
        """Update Welford's mean and sum of squared differences; turn the sum into a variance after warm-up."""
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
        scalars = [float(scalar) for scalar in (self._count, self._mean, self._spread)]
        return {"num_seen": self._num_seen, "numbers": scalars}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_seen = state["num_seen"]
        self._count, self._mean, self._spread = (
            torch.tensor(scalar, dtype=torch.float64) for scalar in state["numbers"]
        )
