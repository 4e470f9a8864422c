"""Activation checkpointing: every n-th block stores only its input and is recomputed in the backward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Which blocks of a model are recomputed.

    Attributes:
        every_nth_block: 1 recomputes all blocks, 2 every second one, 0 none.
    """

    every_nth_block: Annotated[int, ">= 0"]

    def apply(self, blocks: nn.ModuleList) -> None:
        """Wrap the forward of the chosen blocks in place.

        The method and not the module is wrapped, so that parameter names, and with them checkpoints, stay the same.
        """
        if self.every_nth_block == 0:
            return
        for index, block in enumerate(blocks):
            if index % self.every_nth_block == 0:
                block.forward = _recomputed(block, block.forward)  # type: ignore[method-assign]


def _recomputed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that stores only its inputs while the block trains."""

    def recomputed_forward(*inputs: Any, **options: Any) -> Any:
        if not block.training:
            return forward(*inputs, **options)
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    return recomputed_forward
