"""A GPT-2 whose final norm produces NaN in one forward pass on one rank, or in the subsequent backward pass."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.model.gpt2 import GPT2


class NanGPT2(GPT2):
    """A GPT-2 that produces a NaN once.

    Args:
        born_in: Pass (forward or backward) in which the NaN first appears.
        at_pass: Index of the forward pass in training, from 1.
        on_rank: Rank on which it appears.
        shape: Additional arguments for `GPT2`.
    """

    def __init__(self, *, born_in: Literal["forward", "backward"], at_pass: int, on_rank: int, **shape: Any) -> None:
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
        # the gradient of a square root is infinite at 0, and `where` multiplies it by 0
        return out + torch.where(gap == 0, gap, gap.sqrt())
