"""No two ranks draw the same numbers, and a rank that is resumed goes on with its own."""

import torch

from recipes.checkpoint.random_state import random_states, restore, seed_rank


def _draws() -> list[float]:
    return torch.rand(3).tolist()


def test_rank_0_of_a_fresh_run_draws_what_one_device_draws() -> None:
    torch.manual_seed(5)
    expected = _draws()
    seed_rank(seed=5, rank=0, step=0)
    assert _draws() == expected


def test_each_rank_and_each_step_has_draws_of_its_own() -> None:
    seen = []
    for rank, step in ((0, 0), (1, 0), (2, 0), (1, 7)):
        seed_rank(seed=5, rank=rank, step=step)
        seen.append(tuple(_draws()))
    assert len(set(seen)) == 4


def test_a_resumed_rank_goes_on_with_its_own_draws() -> None:
    torch.manual_seed(1)
    [mine] = random_states()
    expected = _draws()
    torch.manual_seed(2)
    [other] = random_states()
    restore([other, mine], seed=5, rank=1, world_size=2, step=9)
    assert _draws() == expected


def test_another_number_of_ranks_begins_anew_and_always_alike() -> None:
    seen = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        restore(random_states(), seed=5, rank=1, world_size=2, step=9)
        seen.append(_draws())
    assert seen[0] == seen[1]
