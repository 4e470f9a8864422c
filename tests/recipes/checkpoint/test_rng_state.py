"""No two ranks draw the same numbers, and a rank that is resumed goes on with its own."""

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from recipes.checkpoint.rng_state import restore, rng_state, seed_rank
from recipes.checkpoint.shard_file import Part, SavedTensor, open_tensors, write_shard


def _draws() -> list[float]:
    return torch.rand(3).tolist()


def _all_draws() -> list[float]:
    """One of each kind from each source; an odd number of normal ones, of which numpy and Python keep one back."""
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
    """As it lies in a checkpoint."""
    folder.mkdir()
    write_shard(folder / "rank_00000.safetensors", state)
    return open_tensors([folder / "rank_00000.safetensors"])


def test_rank_0_of_a_fresh_run_draws_what_one_device_draws() -> None:
    torch.manual_seed(5)
    expected = _draws()
    seed_rank(seed=5, rank=0, step=0)
    assert _draws() == expected


def test_each_rank_and_each_step_has_draws_of_its_own() -> None:
    seen = []
    for rank, step in ((0, 0), (1, 0), (2, 0), (0, 7), (1, 7)):
        seed_rank(seed=5, rank=rank, step=step)
        seen.append(tuple(_draws()))
    assert len(set(seen)) == 5


def test_a_resumed_rank_goes_on_with_its_own_draws_from_every_source(tmp_path: Path) -> None:
    _seed(1)
    _all_draws()  # leaves a normal number in store
    mine = _saved(tmp_path / "mine", rng_state())
    expected = _all_draws()
    _seed(2)
    other = _saved(tmp_path / "other", rng_state())
    restore([other, mine], seed=5, rank=1, world_size=2, step=9)
    assert _all_draws() == expected


def test_a_state_is_a_copy_of_what_it_was(tmp_path: Path) -> None:
    """It is written behind training, which draws on."""
    _seed(1)
    state = rng_state()
    expected = _all_draws()
    mine = _saved(tmp_path / "mine", state)
    restore([mine], seed=5, rank=0, world_size=1, step=9)
    assert _all_draws() == expected


def test_another_number_of_ranks_begins_anew_and_always_alike(tmp_path: Path) -> None:
    seen = []
    for noise in (1, 2):
        _seed(noise)
        state = _saved(tmp_path / str(noise), rng_state())
        restore([state], seed=5, rank=1, world_size=2, step=9)
        seen.append(_draws())
    assert seen[0] == seen[1]
