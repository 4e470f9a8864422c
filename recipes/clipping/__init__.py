"""Adaptive limits of the gradient norm, computed from the norms so far; one file per option of clipping=.

All arithmetic is on the norm's device: no host synchronization.
"""

from typing import Any, Protocol

from torch import Tensor


class Clipping(Protocol):
    """Sees the global norm of every step, which is the same on every rank under every engine."""

    def limit(self, norm: Tensor) -> Tensor:
        """Return the largest norm allowed for this step, a 0-dim tensor; inf: gradients stay as they are.

        Args:
            norm: Of all gradients before clipping, a 0-dim tensor; NaN and inf do not enter the history.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return plain data; waits for the device."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
