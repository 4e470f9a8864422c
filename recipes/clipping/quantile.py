"""Clip at a quantile of recent norms: AutoClip (Seetharaman et al. 2020, arXiv 2007.14469) over a sliding window."""

from typing import Annotated, Any

import torch
from torch import Tensor


class Quantile:
    """Clips the gradient norm to a quantile of recent norms.

    Args:
        quantile: Fraction of recent norms below the threshold: 0.1 clips nine of ten steps, as in the paper; 0.99
            clips one in a hundred.
        window: Number of recent norms, before clipping, over which the quantile is computed.
        warmup_steps: Optimizer steps without clipping.
    """

    def __init__(
        self,
        *,
        quantile: Annotated[float, "> 0, < 1"],
        window: Annotated[int, ">= 2"],
        warmup_steps: Annotated[int, ">= 1"],
    ) -> None:
        self._quantile = quantile
        self._warmup_steps = warmup_steps
        self._num_seen = 0
        self._norms = torch.full((window,), torch.nan)  # [window], ring buffer; NaN: unset

    def limit(self, norm: Tensor) -> Tensor:
        norm = norm.detach()
        self._norms = self._norms.to(norm.device)
        limit = torch.full_like(norm, torch.inf)
        if self._num_seen >= self._warmup_steps:
            # NaN if every norm was infinite
            limit = torch.nanquantile(self._norms, self._quantile).to(norm.dtype).nan_to_num(torch.inf)
        index = self._num_seen % len(self._norms)
        self._norms[index] = torch.where(norm.isfinite(), norm, torch.nan).to(self._norms.dtype)
        self._num_seen += 1
        return limit

    def state_dict(self) -> dict[str, Any]:
        return {"num_seen": self._num_seen, "norms": self._norms.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_seen = state["num_seen"]
        self._norms = torch.tensor(state["norms"], dtype=torch.float32)
