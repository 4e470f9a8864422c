"""Ranks started by torchrun: rank 0 composes the run once, for all ranks and all restarts.

The result is sent through torchrun's TCP store, in which an earlier start may have left keys.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from recipes.config.resolved import ResolvedRun, from_json, to_json
from recipes.errors import ConfigError
from recipes.runtime.local_store import bind_to_loopback
from recipes.runtime.meeting import ANNOUNCE_SECONDS, LOGGER, describe_missing, reach
from recipes.runtime.world import global_rank, started_by

# importing torch takes a second, which runs without torchrun must not pay: only `_open_store` imports it
if TYPE_CHECKING:
    from torch.distributed import TCPStore

_WAIT = timedelta(minutes=10)
_POLL_SECONDS = 0.05
_REPORT_SECONDS = 1.0  # for rank 0 to print the errors
_COMPOSED = "recipes_composed"  # key in the agent's store: the run as first composed, for restarts
_REQUEST = "recipes_rank_{rank}_request"
_OPEN_STORES: list["TCPStore"] = []  # keeps stores alive after the function that opens them


def compose_on_rank_zero(
    compose: Callable[[], tuple[ResolvedRun | None, Sequence[ConfigError]]],
) -> tuple[ResolvedRun | None, Sequence[ConfigError]]:
    """Compose once for all ranks of torchrun and for all restarts.

    A timestamped run folder is then the same on every rank, and a restart resumes in it from its newest valid
    checkpoint. Without torchrun every process composes by itself: under SLURM the job id names the folder.

    Args:
        compose: Composes and checks the run; returns it with the errors found.

    Returns:
        The result of `compose`; on ranks other than 0, None and no errors if rank 0 found some.
    """
    has_peers = os.environ.get("WORLD_SIZE") != "1"
    may_be_restarted = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if started_by() != "torchrun" or not (has_peers or may_be_restarted):
        return compose()
    store = open_torchrun_store()
    if (rank := global_rank()) > 0:
        message = json.loads(receive_from_rank_zero(store, rank=rank))
        if message["composed"] is None:
            time.sleep(_REPORT_SECONDS)  # torchrun ends rank 0 as soon as another rank exits
            return None, []
        rendezvous_at(message["port"])
        return from_json(message["composed"]), []
    resolved, mistakes = _resume_composed(store) if store.check([_COMPOSED]) else compose()
    text = None if mistakes or resolved is None else to_json(resolved)
    port = open_start_store()
    message = json.dumps({"composed": text, "port": port})
    send_to_ranks(store, message, world_size=int(os.environ["WORLD_SIZE"]))
    if text is not None and port is not None:  # the agent's store persists across restarts
        store.set(_COMPOSED, text)
    rendezvous_at(port)
    return resolved, mistakes


def _resume_composed(store: "TCPStore") -> tuple[ResolvedRun | None, Sequence[ConfigError]]:
    """Return the run of an earlier start, set to resume, since a second start from scratch would be rejected."""
    resolved = from_json(store.get(_COMPOSED).decode())
    if resolved.resume is None:
        resolved = resolved.with_settings({"resume": "auto"})
    print("Restarted by torchrun: resuming from the newest valid checkpoint, if any", flush=True)
    return resolved, []


def open_torchrun_store() -> "TCPStore":
    """Open the store at torchrun's address: its agent's, which outlives restarts, or one that rank 0 serves."""
    is_server = not _has_agent_store() and os.environ["RANK"] == "0"
    return _open_store(int(os.environ["MASTER_PORT"]), is_server=is_server)


def open_start_store() -> int | None:
    """Serve, on rank 0, an empty store for this start.

    torch's rendezvous uses the agent's store with the same keys at every start (pytorch #135712, torch 2.13): after a
    restart a rank would read a dead rank's address. Delete this and `rendezvous_at` once that is fixed.

    Returns:
        Port of the store; None if torchrun's own store is new at every start.
    """
    return _open_store(0, is_server=True).port if _has_agent_store() else None


def rendezvous_at(port: int | None) -> None:
    """Make torch rendezvous through the store that rank 0 serves at this port; None keeps torchrun's."""
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(False)


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _open_store(port: int, *, is_server: bool) -> "TCPStore":
    from torch.distributed import TCPStore

    address = os.environ["MASTER_ADDR"]
    if not is_server:
        deadline = time.monotonic() + _WAIT.total_seconds()
        reach(address, port, rank=global_rank(), starter="torchrun", deadline=deadline)
    store = TCPStore(
        address,
        **(bind_to_loopback(address, port) if is_server else {"port": port}),
        is_master=is_server,
        timeout=_WAIT,
        wait_for_workers=False,
        multi_tenant=True,  # torch opens the same store again in this process
    )
    _OPEN_STORES.append(store)
    return store


def send_to_ranks(store: "TCPStore", text: str, *, world_size: int) -> None:
    """Send a text from rank 0 to every other rank of this start, and wait until each has received it.

    The store may hold keys of dead ranks. Each rank therefore requests the text under a new random id, and replies to a
    dead rank's id are never read. torchrun's restart count cannot serve as an id: every agent counts its own restarts.

    Args:
        store: Store with the requests.
        text: Text to send.
        world_size: Ranks of this start, including rank 0.

    Raises:
        TimeoutError: Some ranks have not requested it.
    """
    start = uuid.uuid4().hex
    store.set(start, text)
    deadline = time.monotonic() + _WAIT.total_seconds()
    announce_at = time.monotonic() + ANNOUNCE_SECONDS
    missing = set(range(1, world_size))
    answered: set[str] = set()
    while missing:
        for rank in missing:
            if store.check([_REQUEST.format(rank=rank)]):
                request = store.get(_REQUEST.format(rank=rank)).decode()
                # a live rank may overwrite the request of a dead one: look again until it has received the text
                if request not in answered:
                    store.set(request, start)
                    answered.add(request)
        missing = {rank for rank in missing if not store.check([_receipt(start, rank)])}
        if missing and time.monotonic() > announce_at:
            LOGGER.warning("%s", describe_missing(sorted(missing), world_size, [socket.gethostname()], "torchrun"))
            announce_at += 10 * ANNOUNCE_SECONDS
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} have not connected within {_WAIT}")
        time.sleep(_POLL_SECONDS)
    store.delete_key(start)


def receive_from_rank_zero(store: "TCPStore", *, rank: int) -> str:
    """Receive, on any other rank, the text that rank 0 of this start sends."""
    request = uuid.uuid4().hex
    store.set(_REQUEST.format(rank=rank), request)
    start = store.get(request).decode()
    text: str = store.get(start).decode()
    store.set(_receipt(start, rank), "received")
    return text


def _receipt(start: str, rank: int) -> str:
    return f"{start}_received_by_{rank}"
