"""Detect a vanishing or rising gradient norm; costs a sort of 50 Python floats per call, no torch."""

import math
import statistics
from collections import deque
from typing import Any

_WINDOW = 50  # norms per median


class NormTrend:
    """Warns once when the norm vanishes or keeps rising, and again only after it has recovered.

    Args:
        vanishing: Norm below which gradients have vanished.
        rising: Largest allowed factor between the median of the last 50 norms and the lowest such median so far.
    """

    def __init__(self, *, vanishing: float, rising: float) -> None:
        self._vanishing = vanishing
        self._rising = rising
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._lowest: float | None = None  # median so far
        self._state: str | None = None  # warned about: "vanishing" or "rising"

    def observe(self, norm: float) -> str | None:
        """Add a norm; return a warning if it has just started to vanish or rise, else None."""
        if not math.isfinite(norm):
            return None
        self._norms.append(norm)
        state, warning = None, ""
        if norm < self._vanishing:
            state = "vanishing"
            warning = f"the gradient norm has vanished, {norm:.3g}: nothing is learned"
        elif len(self._norms) == _WINDOW:
            median = statistics.median(self._norms)
            self._lowest = median if self._lowest is None else min(self._lowest, median)
            if median > self._rising * self._lowest:
                state = "rising"
                warning = (
                    f"the gradient norm has risen to {median:.3g} from {self._lowest:.3g}:"
                    " try a smaller learning rate or a longer warm-up"
                )
        is_new, self._state = state not in (None, self._state), state
        return warning if is_new else None

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"norms": list(self._norms), "lowest": self._lowest, "state": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._norms = deque(state["norms"], maxlen=_WINDOW)
        self._lowest, self._state = state["lowest"], state["state"]
