"""Rotary positions (Su et al. 2021, arXiv:2104.09864) in float32: two tables [positions, Q / 2].

Halves are rotated against each other, not neighbors, as in the published Llama and Qwen weights.
Shapes: B sequences, T tokens, H heads, Q head size.
"""

import math

import torch
from torch import Tensor

# Llama 3.1 to 3.3 (config.json of the released weights): wavelengths that fit fewer than LOW times
# into the first training context are stretched by the factor, those that fit more than HIGH times
# are left, between: interpolated.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_CONTEXT = 8192


class Rotation:
    """Cosines and sines of T positions, [T, 1, Q / 2] float32 each.

    A plain class, and no dataclass, tuple or dict on purpose: FSDP2's mixed precision casts every
    tensor that it finds in those, among the arguments of a block, to bfloat16, in which positions
    above 256 are no longer told apart (`torch.distributed.utils._apply_to_tensors`).
    """

    def __init__(self, *, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin


def frequencies(head_size: int, *, theta: float, scaling_factor: float | None) -> Tensor:
    """Radians per position of each pair of channels: [Q / 2] float32, on the CPU."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    plain = 1.0 / theta**exponents
    if scaling_factor is None:
        return plain
    wavelengths = 2 * math.pi / plain
    turns = ORIGINAL_CONTEXT / wavelengths  # how often a wave fits into the first context
    kept = ((turns - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)).clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling_factor + kept * plain


def rope_tables(
    num_positions: int, *, head_size: int, theta: float, scaling_factor: float | None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0, 1, ...: [num_positions, Q / 2] float32, on the CPU."""
    speeds = frequencies(head_size, theta=theta, scaling_factor=scaling_factor)
    positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, speeds)  # [positions, Q / 2]
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair of channels (i, i + Q / 2) by its angle: [B, T, H, Q] -> [B, T, H, Q]."""
    first, second = heads.float().chunk(2, dim=-1)  # [B, T, H, Q / 2] each
    turned = (
        first * rotation.cos - second * rotation.sin,
        second * rotation.cos + first * rotation.sin,
    )
    return torch.cat(turned, dim=-1).to(heads.dtype)
