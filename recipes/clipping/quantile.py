"""Clipping at a quantile of the recent norms: AutoClip (Seetharaman et al. 2020, arXiv 2007.14469), in a window."""

from typing import Annotated, Any

import torch
from torch import Tensor


class Quantile:
    """A norm above the quantile of the last norms is scaled down to it.

    Args:
        quantile: 0.1 clips nine steps of ten, as the paper does; 0.99 one of a hundred.
        window: So many norms, before clipping, are remembered.
        warmup_steps: Norms before anything is clipped.
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
        self._norms = torch.full((window,), torch.nan)  # [window], NaN where there is none; a ring

    def limit(self, norm: Tensor) -> Tensor:
        norm = norm.detach()
        self._norms = self._norms.to(norm.device)
        limit = torch.full_like(norm, torch.inf)
        if self._num_seen >= self._warmup_steps:
            # NaN where every norm was infinite
            limit = (
                torch.nanquantile(self._norms, self._quantile).to(norm.dtype).nan_to_num(torch.inf)
            )
        place = self._num_seen % len(self._norms)
        self._norms[place] = torch.where(norm.isfinite(), norm, torch.nan).to(self._norms.dtype)
        self._num_seen += 1
        return limit

    def state_dict(self) -> dict[str, Any]:
        return {"num_seen": self._num_seen, "norms": self._norms.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_seen = state["num_seen"]
        self._norms = torch.tensor(state["norms"], dtype=torch.float32)
