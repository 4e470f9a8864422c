"""Ranks communicate through a store that still holds keys of earlier, crashed launches."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from recipes.entry import torchrun
from recipes.entry.torchrun import receive_from_rank_zero, send_to_ranks


@pytest.fixture
def store() -> TCPStore:
    """Return a store like that of torchrun's agent."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))


def test_restarts_that_share_a_store_do_not_receive_stale_messages(store: TCPStore) -> None:
    clients = [connect(store) for _ in range(2)]
    with ThreadPoolExecutor(max_workers=4) as executor:
        for attempt in range(3):
            # rank 1 of an earlier launch sent its request and died before the reply
            store.set("recipes_rank_1_request", f"dead_{attempt}")
            futures = [
                executor.submit(receive_from_rank_zero, client, rank=rank)
                for rank, client in enumerate(clients, start=1)
            ]
            send_to_ranks(store, f"attempt {attempt}", world_size=3)
            assert [future.result(timeout=30) for future in futures] == [f"attempt {attempt}"] * 2


def test_the_timeout_names_the_ranks_that_never_connected(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_WAIT", timedelta(seconds=0.2))
    with ThreadPoolExecutor(max_workers=1) as executor:
        future = executor.submit(receive_from_rank_zero, connect(store), rank=1)
        with pytest.raises(TimeoutError, match=r"ranks \[2\] have not connected"):
            send_to_ranks(store, "message", world_size=3)
        assert future.result(timeout=30) == "message"
