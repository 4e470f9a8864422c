"""A GPT-2 whose last norm makes a NaN in one forward pass of one rank, or in the backward pass that follows it."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.model.gpt2 import GPT2


class NanGPT2(GPT2):
    """Further arguments: see `GPT2`.

    Args:
        born_in: Where the NaN is born.
        at_pass: After so many forward passes of training.
        on_rank: Whose NaN it is.
    """

    def __init__(
        self, *, born_in: Literal["forward", "backward"], at_pass: int, on_rank: int, **shape: Any
    ) -> None:
        super().__init__(**shape)
        self.norm = _Norm(self.hidden_size)
        self.norm.fault = (born_in, at_pass, on_rank)


class _Norm(nn.LayerNorm):
    fault: tuple[str, int, int]
    num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        born_in, at_pass, on_rank = self.fault
        self.num_passes += self.training
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.num_passes != at_pass or rank != on_rank:
            return out
        gap = out - out
        if born_in == "forward":
            return out + gap / gap  # 0 / 0
        # the gradient of a root is infinite at 0, and what `where` sends back is 0 times it
        return out + torch.where(gap == 0, gap, gap.sqrt())
