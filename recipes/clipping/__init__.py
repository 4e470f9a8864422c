"""The norm above which gradients are scaled down, from the norms of the run so far; one file an option of clipping=.

All arithmetic is on the norm's device: nothing waits for it.
"""

from typing import Any, Protocol

from torch import Tensor


class Clipping(Protocol):
    """Sees the global norm of every step, the same on every rank, whatever engine shards the gradients."""

    def limit(self, norm: Tensor) -> Tensor:
        """The norm to scale a step's gradients down to, a 0-dim tensor; inf: they stay as they are.

        Args:
            norm: Of all gradients before clipping, a 0-dim tensor; one that is not finite is not remembered.
        """

    def state_dict(self) -> dict[str, Any]:
        """Plain data; waits for the device."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
