"""The ranks of one start of torchrun find each other, whatever earlier starts have left in its store; some messages."""

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from recipes.config.compose import Composed, from_json, to_json
from recipes.errors import ConfigError
from recipes.runtime.world import global_rank, started_by

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_WAIT = timedelta(minutes=10)
_POLL_SECONDS = 0.05
_SERVED: list["TCPStore"] = []  # a store must outlive the function that opens it
_ASKS = "recipes_rank_{rank}_asks"


def torchrun_store() -> "TCPStore":
    """The store that torchrun tells its ranks of: served by its agent through all starts, or by rank 0 for this one."""
    serves = not _is_agents() and os.environ["RANK"] == "0"
    return _store(int(os.environ["MASTER_PORT"]), serves=serves)


def open_start_store() -> int | None:
    """By rank 0: serve a store in which nothing is left from earlier starts.

    torch meets in the agent's own, under the same keys at every start (pytorch #135712, torch 2.13): a rank then takes
    the address of one that is dead.

    Returns:
        Its port; None where torchrun's is of this start as it is.
    """
    return _store(0, serves=True).port if _is_agents() else None


def rendezvous_at(port: int | None) -> None:
    """Let torch meet in the store that rank 0 serves for this start."""
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(False)


def send_to_ranks(store: "TCPStore", text: str, *, world_size: int) -> None:
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


def receive_from_rank_zero(store: "TCPStore", *, rank: int) -> str:
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


def _store(port: int, *, serves: bool) -> "TCPStore":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

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


_TELL_SECONDS = 1.0


_BEGUN = "recipes_begun"  # in the store of torchrun's agent: the run as it was composed first


def compose_on_rank_zero(
    compose: Callable[[], tuple[Composed | None, Sequence[ConfigError]]],
) -> tuple[Composed | None, Sequence[ConfigError]]:
    """Compose once for all ranks of torchrun, and for all times that it starts them.

    The folder named by the clock is then the same everywhere, and a restart goes on in it, from its newest whole
    checkpoint. Everywhere else every process composes: SLURM's job names the folder.

    Returns:
        As `compose`; on other ranks than 0, None and no mistakes where rank 0 found some.
    """
    if started_by() != "torchrun" or not (_has_peers() or _may_be_restarted()):
        return compose()
    store = torchrun_store()
    if (rank := global_rank()) > 0:
        told = json.loads(receive_from_rank_zero(store, rank=rank))
        if told["composed"] is None:
            time.sleep(_TELL_SECONDS)  # torchrun ends rank 0 as soon as another rank has ended
            return None, []
        rendezvous_at(told["port"])
        return from_json(told["composed"]), []
    composed, mistakes = (_begun(store), []) if store.check([_BEGUN]) else compose()
    text = None if mistakes or composed is None else to_json(composed)
    port = open_start_store()
    word = json.dumps({"composed": text, "port": port})
    send_to_ranks(store, word, world_size=int(os.environ["WORLD_SIZE"]))
    if text is not None and port is not None:  # the agent's store is still there at a restart
        store.set(_BEGUN, text)
    rendezvous_at(port)
    return composed, mistakes


def _has_peers() -> bool:
    return os.environ["WORLD_SIZE"] != "1"


def _may_be_restarted() -> bool:
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _begun(store: Any) -> Composed:
    """The run that torchrun has started before; it goes on, where a start from nothing would be refused."""
    composed = from_json(store.get(_BEGUN).decode())
    if composed.config["resume"] is None:
        composed.config["resume"] = "auto"
    print(
        "Started again by torchrun: from the newest whole checkpoint, if there is one", flush=True
    )
    return composed
