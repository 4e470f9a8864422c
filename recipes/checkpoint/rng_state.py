"""The random numbers of a rank, saved by it and given back to it: torch's, numpy's and Python's."""

import hashlib
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.checkpoint.shard_file import Part, SavedTensor
from recipes.checkpoint.shards import unsharded_part


def seed_rank(*, seed: int, rank: int, step: int) -> None:
    """Draws of this rank from here on: its own, so that no two ranks drop the same activations.

    Rank 0 of a run that begins keeps the seed itself, as one device has it.
    """
    if (rank, step) != (0, 0):
        digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
    torch.manual_seed(seed)


def rng_state() -> dict[str, Part]:
    """Of this rank, by source, as tensors."""
    states = {"cpu": torch.get_rng_state(), "numpy": _of_numpy(), "python": _of_python()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {source: unsharded_part(state) for source, state in states.items()}


def restore(
    states: Sequence[Mapping[str, SavedTensor]],
    *,
    seed: int,
    rank: int,
    world_size: int,
    step: int,
) -> None:
    """Go on where this rank was; with another number of ranks there is no such place, and draws begin anew."""
    if len(states) != world_size:
        seed_rank(seed=seed, rank=rank, step=step)
        return
    mine = {source: state.whole() for source, state in states[rank].items()}
    torch.set_rng_state(mine["cpu"])
    if torch.cuda.is_available() and "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"])
    *keys, position, has_gauss, gauss = mine["numpy"].tolist()
    of_numpy = ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _float(gauss))
    np.random.set_state(of_numpy)
    *internal, has_gauss, gauss = mine["python"].tolist()
    version = random.getstate()[0]
    random.setstate((version, tuple(internal), _float(gauss) if has_gauss else None))


def _of_numpy() -> Tensor:
    state: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, gauss = state
    return torch.tensor([*keys.tolist(), position, has_gauss, _bits(gauss)])


def _of_python() -> Tensor:
    _, internal, gauss = random.getstate()
    return torch.tensor([*internal, gauss is not None, _bits(gauss or 0.0)])


def _bits(number: float) -> int:
    """A float as the whole number with the same 64 bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _float(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
