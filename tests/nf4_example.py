"""A weight to quantize with bitsandbytes and this project, built from integers: identical bits on every machine."""

import torch
from torch import Tensor


def nf4_example() -> Tensor:
    """Return [64, 128] float32 between -1 and 1: few large values, blocks with seven scales, and one block of zeros."""
    number = torch.arange(64 * 128)
    values = ((number * 7919 % 2003) - 1001).double().div(1024).pow(3)  # exact
    sizes = 2.0 ** -(number // 64 % 7).double()
    return torch.where(number // 64 == 5, 0.0, values * sizes).float().view(64, 128)
