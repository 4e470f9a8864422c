"""The ranks of one start of torchrun find each other, whatever earlier starts have left in its store; some messages."""

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_WAIT = timedelta(minutes=10)
_POLL_SECONDS = 0.05
_SERVED: list[TCPStore] = []  # a store must outlive the function that opens it
_ASKS = "recipes_rank_{rank}_asks"


def torchruns_store() -> TCPStore:
    """The store that torchrun tells its ranks of: served by its agent through all starts, or by rank 0 for this one."""
    serves = not _is_agents() and os.environ["RANK"] == "0"
    return _store(int(os.environ["MASTER_PORT"]), serves=serves)


def store_of_this_start() -> int | None:
    """By rank 0: serve a store in which nothing is left from earlier starts.

    torch meets in the agent's own, under the same keys at every start (pytorch #135712, torch 2.13): a rank then takes
    the address of one that is dead.

    Returns:
        Its port; None where torchrun's is of this start as it is.
    """
    return _store(0, serves=True).port if _is_agents() else None


def meet_at(port: int | None) -> None:
    """Let torch meet in the store that rank 0 serves for this start."""
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(False)


def tell(store: TCPStore, text: str, *, world_size: int) -> None:
    """By rank 0: say it to every other rank of this start, and wait until each has heard it.

    A rank asks by a word that nobody has used before: what a dead one has asked for is answered in vain. The number of
    restarts that torchrun tells would not do: agents count their own.

    Args:
        store: In which they ask.
        text: What to say.
        world_size: Ranks of this start, with rank 0.

    Raises:
        TimeoutError: Some have not come.
    """
    start = uuid.uuid4().hex
    store.set(start, text)
    until = time.monotonic() + _WAIT.total_seconds()
    missing = set(range(1, world_size))
    answered: set[str] = set()
    while missing:
        for rank in missing:
            if store.check([_ASKS.format(rank=rank)]):
                word = store.get(_ASKS.format(rank=rank)).decode()
                if word not in answered:
                    store.set(word, start)
                    answered.add(word)
        missing = {rank for rank in missing if not store.check([_heard(start, rank)])}
        if missing and time.monotonic() > until:
            raise TimeoutError(f"ranks {sorted(missing)} have not come within {_WAIT}")
        time.sleep(_POLL_SECONDS)
    store.delete_key(start)


def hear(store: TCPStore, *, rank: int) -> str:
    """By every other rank: what rank 0 of this start says."""
    word = uuid.uuid4().hex
    store.set(_ASKS.format(rank=rank), word)
    start = store.get(word).decode()
    text: str = store.get(start).decode()
    store.set(_heard(start, rank), "yes")
    return text


def _heard(start: str, rank: int) -> str:
    return f"{start}_heard_by_{rank}"


def _is_agents() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _store(port: int, *, serves: bool) -> TCPStore:
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        is_master=serves,
        timeout=_WAIT,
        wait_for_workers=False,
        multi_tenant=True,  # torch opens the same one again in this process
    )
    _SERVED.append(store)
    return store
