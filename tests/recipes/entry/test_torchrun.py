"""Ranks of one start find each other in a store that is full of what dead ranks have left."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from recipes.entry import torchrun as meeting
from recipes.entry.torchrun import receive_from_rank_zero, send_to_ranks


@pytest.fixture
def store() -> TCPStore:
    """The store of an agent, as rank 0 sees it."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def seen_by_another(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))


def test_three_starts_in_one_store_hear_each_its_own_rank_0_and_nothing_of_the_dead(
    store: TCPStore,
) -> None:
    seen = [seen_by_another(store) for _ in range(2)]
    with ThreadPoolExecutor(max_workers=4) as ranks:
        for start in range(3):
            # rank 1 of an earlier start has asked and died before it was answered
            store.set("recipes_rank_1_asks", f"dead_{start}")
            heard = [
                ranks.submit(receive_from_rank_zero, one, rank=rank)
                for rank, one in enumerate(seen, start=1)
            ]
            send_to_ranks(store, f"start {start}", world_size=3)
            assert [one.result(timeout=30) for one in heard] == [f"start {start}"] * 2


def test_a_rank_that_never_comes_is_named(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_WAIT", timedelta(seconds=0.2))
    with ThreadPoolExecutor(max_workers=1) as ranks:
        heard = ranks.submit(receive_from_rank_zero, seen_by_another(store), rank=1)
        with pytest.raises(TimeoutError, match=r"ranks \[2\] have not come"):
            send_to_ranks(store, "to three", world_size=3)
        assert heard.result(timeout=30) == "to three"
