"""No two ranks draw the same random numbers, and a resumed rank continues its own sequence."""

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from recipes.checkpoint.rng_state import read_states, restore, rng_state, seed_rank
from recipes.checkpoint.saved_tensor import SavedTensor, open_tensors
from recipes.checkpoint.shard_file import Part, write_shard


def _draws() -> list[float]:
    return torch.rand(3).tolist()


def _all_draws() -> list[float]:
    """Draw every kind from every source; of an odd number of normal samples numpy and Python buffer one."""
    return [
        *_draws(),
        *torch.randn(3).tolist(),
        *np.random.rand(3).tolist(),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
        float(random.randrange(10**9)),
    ]


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def _saved(folder: Path, state: Mapping[str, Part]) -> dict[str, SavedTensor]:
    """Write a state to a file and open it, as in a checkpoint."""
    folder.mkdir()
    write_shard(folder / "rank_00000.safetensors", state)
    return open_tensors([folder / "rank_00000.safetensors"])


def test_rank_0_of_a_new_run_draws_what_one_device_draws() -> None:
    torch.manual_seed(5)
    expected = _draws()
    seed_rank(seed=5, rank=0, step=0)
    assert _draws() == expected


def test_each_rank_and_each_step_draws_different_numbers() -> None:
    seen = []
    for rank, step in ((0, 0), (1, 0), (2, 0), (0, 7), (1, 7)):
        seed_rank(seed=5, rank=rank, step=step)
        seen.append(tuple(_draws()))
    assert len(set(seen)) == 5


def test_a_resumed_rank_continues_its_own_sequence_of_every_source(tmp_path: Path) -> None:
    _seed(1)
    _all_draws()  # leaves a normal sample in the buffer
    own = _saved(tmp_path / "own", rng_state())
    expected = _all_draws()
    _seed(2)
    other = _saved(tmp_path / "other", rng_state())
    restore(read_states([other, own], rank=1, world_size=2), seed=5, rank=1, step=9)
    assert _all_draws() == expected


def test_a_state_is_a_copy(tmp_path: Path) -> None:
    """It is written in the background while training keeps drawing."""
    _seed(1)
    state = rng_state()
    expected = _all_draws()
    own = _saved(tmp_path / "own", state)
    restore(read_states([own], rank=0, world_size=1), seed=5, rank=0, step=9)
    assert _all_draws() == expected


def test_another_number_of_ranks_seeds_again_the_same_way_every_time(tmp_path: Path) -> None:
    seen = []
    for noise in (1, 2):
        _seed(noise)
        state = _saved(tmp_path / str(noise), rng_state())
        restore(read_states([state], rank=1, world_size=2), seed=5, rank=1, step=9)
        seen.append(_draws())
    assert seen[0] == seen[1]
