"""Whether a gradient norm has vanished, or has risen for long. Arithmetic on host numbers, a sort of 50 a look."""

import math
import statistics
from collections import deque
from typing import Any

_WINDOW = 50  # norms that the median is of


class NormTrend:
    """Tells a state once, and again after it has been well in between.

    Args:
        vanishing: A norm below it updates nothing.
        rising: Factor between the median of the last norms and the lowest it has been.
    """

    def __init__(self, *, vanishing: float, rising: float) -> None:
        self._vanishing = vanishing
        self._rising = rising
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._lowest: float | None = None
        self._told: str | None = None

    def observe(self, norm: float) -> str | None:
        """A line to tell, or None."""
        if not math.isfinite(norm):
            return None
        self._norms.append(norm)
        kind, line = None, ""
        if norm < self._vanishing:
            kind, line = (
                "vanishing",
                f"the gradient norm has vanished, {norm:.3g}: nothing is learnt",
            )
        elif len(self._norms) == _WINDOW:
            median = statistics.median(self._norms)
            self._lowest = median if self._lowest is None else min(self._lowest, median)
            if median > self._rising * self._lowest:
                kind = "rising"
                line = (
                    f"the gradient norm has risen to {median:.3g} from {self._lowest:.3g}:"
                    " a smaller optimizer.lr or a longer warm-up may be due"
                )
        is_new, self._told = kind not in (None, self._told), kind
        return line if is_new else None

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"norms": list(self._norms), "lowest": self._lowest, "told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._norms = deque(state["norms"], maxlen=_WINDOW)
        self._lowest, self._told = state["lowest"], state["told"]
