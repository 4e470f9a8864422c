"""Save and restore a rank's random number generators: torch's, numpy's and Python's."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shard_file import Part
from recipes.checkpoint.shards import unsharded_part


def seed_rank(*, seed: int, rank: int, step: int) -> None:
    """Seed torch differently on every rank, so that no two ranks drop the same activations.

    Rank 0 at step 0 uses the seed itself, as a run on one device does.
    """
    if (rank, step) != (0, 0):
        digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
    torch.manual_seed(seed)


def rng_state() -> dict[str, Part]:
    """Return this rank's generator states by source, as tensors."""
    states = {"cpu": torch.get_rng_state(), "numpy": _numpy_state(), "python": _python_state()}
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
    """Restore this rank's generators, or reseed them if the number of ranks has changed.

    Args:
        states: Saved states by source, one entry per saving rank.
        seed: Seed of the run.
        rank: Rank of this process.
        world_size: Current number of ranks.
        step: Optimizer steps completed.
    """
    if len(states) != world_size:
        seed_rank(seed=seed, rank=rank, step=step)
        return
    saved = {source: state.read() for source, state in states[rank].items()}
    torch.set_rng_state(saved["cpu"])
    if torch.cuda.is_available() and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"])
    *keys, position, has_gauss, gauss = saved["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _to_float(gauss)))
    *internal, has_gauss, gauss = saved["python"].tolist()
    version = random.getstate()[0]
    random.setstate((version, tuple(internal), _to_float(gauss) if has_gauss else None))


def _numpy_state() -> Tensor:
    state: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, gauss = state
    return torch.tensor([*keys.tolist(), position, has_gauss, _to_bits(gauss)])  # [627], int64


def _python_state() -> Tensor:
    _, internal, gauss = random.getstate()
    return torch.tensor([*internal, gauss is not None, _to_bits(gauss or 0.0)])  # [627], int64


def _to_bits(number: float) -> int:
    """Return the integer with the same 64 bits as a float: an int64 tensor then holds the state exactly."""
    return int(np.float64(number).view(np.int64))


def _to_float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
