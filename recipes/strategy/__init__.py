"""How a step is carried out on the devices: each engine a small subclass of Lightning's, answering `Engine`."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn


class Engine(Protocol):
    """The questions that tasks and modes ask; no other code asks which strategy it runs under."""

    @property
    def root_device(self) -> torch.device: ...

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Prepare a model made on the meta device for this engine, before its weights exist."""

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> Tensor:
        """Clip in place, where asked; give the global L2 norm before clipping, a 0-dim tensor."""

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Add a tensor over all ranks."""
