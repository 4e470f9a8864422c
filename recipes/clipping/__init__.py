"""Adaptive gradient clipping thresholds from the history of the gradient norm; one file per option of clipping=.

All computation is on the device of the norm, without host synchronization.
"""

from typing import Any, Protocol

from torch import Tensor


class Clipping(Protocol):
    """Computes a clipping threshold from the global norm of every step, which is the same on every rank."""

    def limit(self, norm: Tensor) -> Tensor:
        """Return the maximum gradient norm for this step, a 0-dim tensor; inf: no clipping.

        Args:
            norm: Global gradient norm before clipping, a 0-dim tensor; NaN and inf are not added to the history.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python data; synchronizes with the device."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
