"""Rotary position embeddings (RoPE; Su et al. 2021, arXiv:2104.09864) in float32: two tables [positions, Q / 2].

Channel i is paired with channel i + Q / 2, as in the published Llama and Qwen weights; DeepSeek pairs neighboring
channels.

Shapes: B sequences, T tokens, H heads, Q head size.
"""

import math

import torch
from torch import Tensor

# Llama 3.1 to 3.3 (config.json of the released weights): wavelengths that fit fewer than LOW times into the original
# training context are stretched by the factor, those that fit more than HIGH times are unchanged, and those in between
# are interpolated.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_CONTEXT = 8192
LLAMA3_ROPE = {  # as config.json names them; the factor is stated beside them
    "rope_type": "llama3",
    "low_freq_factor": LOW_FREQ_FACTOR,
    "high_freq_factor": HIGH_FREQ_FACTOR,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}


class Rotation:
    """Cosines and sines of T positions, [T, 1, Q / 2] float32 each.

    Deliberately a plain class: FSDP2's mixed precision casts every tensor inside a dataclass, tuple or dict among the
    arguments of a block to bfloat16, in which positions above 256 coincide
    (`torch.distributed.utils._apply_to_tensors`).
    """

    def __init__(self, *, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin


def frequencies(head_size: int, *, theta: float, scaling_factor: float | None) -> Tensor:
    """Return the frequency of each channel pair in radians per position: [Q / 2] float32, on the CPU."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    plain = 1.0 / theta**exponents
    if scaling_factor is None:
        return plain
    wavelengths = 2 * math.pi / plain
    turns = ORIGINAL_CONTEXT / wavelengths  # [Q / 2], full turns within the original context
    unscaled = ((turns - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)).clamp(0.0, 1.0)
    return (1 - unscaled) * plain / scaling_factor + unscaled * plain


def rope_tables(
    num_positions: int, *, head_size: int, theta: float, scaling_factor: float | None
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine tables for positions 0, 1, ...: [num_positions, Q / 2] float32 each, on the CPU."""
    radians = frequencies(head_size, theta=theta, scaling_factor=scaling_factor)  # [Q / 2]
    positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, radians)  # [num_positions, Q / 2]
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: Rotation, *, pairs_neighbors: bool = False) -> Tensor:
    """Rotate each channel pair by its angle, [B, T, H, Q] -> [B, T, H, Q]; output pairs are (i, i + Q / 2).

    Args:
        heads: Queries and keys.
        rotation: Rotation of the tokens.
        pairs_neighbors: Whether input pairs are (2 i, 2 i + 1) instead of (i, i + Q / 2).
    """
    if pairs_neighbors:
        first, second = heads.float().view(*heads.shape[:-1], -1, 2).unbind(dim=-1)  # [B, T, H, Q / 2] each
    else:
        first, second = heads.float().chunk(2, dim=-1)
    rotated = (
        first * rotation.cos - second * rotation.sin,
        second * rotation.cos + first * rotation.sin,
    )
    return torch.cat(rotated, dim=-1).to(heads.dtype)
