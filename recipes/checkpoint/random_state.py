"""The random numbers of every rank: gathered into a checkpoint, given back to the rank they were of."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

State = dict[str, torch.Tensor]


def seed_rank(*, seed: int, rank: int, step: int) -> None:
    """Draws of this rank from here on: its own, so that no two ranks drop the same activations.

    Rank 0 of a run that begins keeps the seed itself, as one device has it.
    """
    if (rank, step) != (0, 0):
        digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
    torch.manual_seed(seed)


def random_states() -> list[State]:
    """Of every rank, in order. A collective."""
    mine: State = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        mine["cuda"] = torch.cuda.get_rng_state()
    if not dist.is_initialized():
        return [mine]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, mine)
    return states


def restore(states: list[State], *, seed: int, rank: int, world_size: int, step: int) -> None:
    """Go on where this rank was; with another number of ranks there is no such place, and draws begin anew."""
    if len(states) != world_size:
        seed_rank(seed=seed, rank=rank, step=step)
        return
    torch.set_rng_state(states[rank]["cpu"])
    if torch.cuda.is_available() and "cuda" in states[rank]:
        torch.cuda.set_rng_state(states[rank]["cuda"])
