"""Ranks of one start exchange messages in a store that still holds the keys of dead ranks."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from recipes.entry import torchrun
from recipes.entry.torchrun import receive_from_rank_zero, send_to_ranks


@pytest.fixture
def store() -> TCPStore:
    """Serve the store of an agent, as rank 0 sees it."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))


def test_in_one_store_each_of_three_starts_receives_from_its_own_rank_0(
    store: TCPStore,
) -> None:
    clients = [connect(store) for _ in range(2)]
    with ThreadPoolExecutor(max_workers=4) as ranks:
        for start in range(3):
            # rank 1 of an earlier start has sent its request and died before the answer
            store.set("recipes_rank_1_request", f"dead_{start}")
            received = [
                ranks.submit(receive_from_rank_zero, client, rank=rank) for rank, client in enumerate(clients, start=1)
            ]
            send_to_ranks(store, f"start {start}", world_size=3)
            assert [text.result(timeout=30) for text in received] == [f"start {start}"] * 2


def test_a_rank_that_never_connects_is_named(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_WAIT", timedelta(seconds=0.2))
    with ThreadPoolExecutor(max_workers=1) as ranks:
        received = ranks.submit(receive_from_rank_zero, connect(store), rank=1)
        with pytest.raises(TimeoutError, match=r"ranks \[2\] have not connected"):
            send_to_ranks(store, "to three", world_size=3)
        assert received.result(timeout=30) == "to three"
