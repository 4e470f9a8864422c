"""Save and restore a rank's random number generators: torch's, numpy's and Python's."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shard_file import Part
from recipes.checkpoint.shards import unsharded_part

_NUM_KEYS = 624  # of a Mersenne Twister


@dataclass(frozen=True, kw_only=True)
class GeneratorStates:
    """States of one rank's generators, each in the form that its library takes."""

    cpu: Tensor
    cuda: Tensor | None
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]


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


def read_states(states: Sequence[Mapping[str, SavedTensor]], *, rank: int, world_size: int) -> GeneratorStates | None:
    """Read the saved states of this rank, and try each on a generator of its own; None if the ranks have changed.

    Args:
        states: Saved states by source, one entry per saving rank.
        rank: Rank of this process.
        world_size: Current number of ranks.

    Raises:
        ValueError: A state has another form than `rng_state` returns; the libraries raise errors of their own.
    """
    if len(states) != world_size:
        return None
    saved = {source: state.read() for source, state in states[rank].items()}
    for source in ("numpy", "python"):
        if saved[source].dtype != torch.int64 or saved[source].shape != (_NUM_KEYS + 3,):
            raise ValueError(f"the state of the random numbers of {source} is {_describe(saved[source])}")
    *keys, position, has_gauss, gauss = saved["numpy"].tolist()
    if not 0 <= position <= _NUM_KEYS:  # numpy would read beyond the keys
        raise ValueError(f"the state of the random numbers of numpy is at position {position} of {_NUM_KEYS}")
    numpy = ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _to_float(gauss))
    *internal, has_gauss, gauss = saved["python"].tolist()
    python = (random.getstate()[0], tuple(internal), _to_float(gauss) if has_gauss else None)
    read = GeneratorStates(cpu=saved["cpu"], cuda=saved.get("cuda"), numpy=numpy, python=python)
    torch.Generator().set_state(read.cpu)
    if read.cuda is not None and torch.cuda.is_available():
        torch.Generator("cuda").set_state(read.cuda)
    np.random.RandomState().set_state(read.numpy)
    random.Random().setstate(read.python)
    return read


def restore(states: GeneratorStates | None, *, seed: int, rank: int, step: int) -> None:
    """Restore this rank's generators, or seed them if there is no state to restore.

    Args:
        states: States of this rank; None without a checkpoint, or if the number of ranks has changed.
        seed: Seed of the run.
        rank: Rank of this process.
        step: Optimizer steps completed.
    """
    if states is None:
        seed_rank(seed=seed, rank=rank, step=step)
        return
    torch.set_rng_state(states.cpu)
    if torch.cuda.is_available() and states.cuda is not None:
        torch.cuda.set_rng_state(states.cuda)
    np.random.set_state(states.numpy)
    random.setstate(states.python)


def _describe(state: Tensor) -> str:
    return f"{list(state.shape)} of {state.dtype}"


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
