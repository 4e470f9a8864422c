"""Wait until every rank has started, and log after seconds which ones are missing. Imports torch when called.

torch's own rendezvous waits for half an hour without a line.
"""

import logging
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from recipes.files import describe
from recipes.runtime.world import Ranks, Starter, global_rank

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOGGER = logging.getLogger("lightning_recipes")
_TIMEOUT = timedelta(minutes=30)  # as torch and Lightning wait for a collective
ANNOUNCE_SECONDS = 5.0  # of waiting until it is logged; then ten times as long
_POLL_SECONDS = 0.02
_WAY_OUT = {
    "slurm": "if srun does not start them, as in an interactive shell: ignore_slurm=true",
    "torchrun": "if these are variables left over from torchrun: unset RANK WORLD_SIZE LOCAL_RANK",
    "spawn": "this run has started them, and ends if one of them fails",
}
_OPEN_STORES: list["TCPStore"] = []  # keeps stores alive after the function that opens them


def meet(ranks: Ranks, *, address: str, port: int) -> None:
    """Return once all ranks of a run have called this; does nothing for a single rank.

    Args:
        ranks: The ranks, which a launcher has started.
        address: Host of rank 0, at which torch opens its store afterwards.
        port: Port of that store.

    Raises:
        TimeoutError: Some ranks have not called it within half an hour.
    """
    from torch.distributed import TCPStore

    if ranks.world_size == 1 or ranks.started_by is None:
        return
    rank = global_rank()
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    if rank > 0:
        reach(address, port, rank=rank, starter=ranks.started_by, deadline=deadline)
    store = TCPStore(
        address,
        port,
        is_master=rank == 0,  # where ranks share a machine, this process serves it already, on loopback
        timeout=_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,  # torch opens the same store again in this process
    )
    _OPEN_STORES.append(store)
    store.set(_key(rank), socket.gethostname())
    if rank == 0:
        _wait_for_all(store, ranks.world_size, ranks.started_by, deadline)


def describe_missing(missing: list[int], world_size: int, hosts: list[str], starter: Starter) -> str:
    """Return for whom rank 0 waits, who has come, and what to type if nobody has started the others."""
    named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing[:8]))}"
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return f"Waiting for {named}{more} of {world_size}; started so far on {', '.join(hosts)}; {_WAY_OUT[starter]}"


def _wait_for_all(store: "TCPStore", world_size: int, starter: Starter, deadline: float) -> None:
    began = announced_at = time.monotonic()
    pause = ANNOUNCE_SECONDS
    missing = list(range(world_size))
    while missing := [rank for rank in missing if not store.check([_key(rank)])]:
        now = time.monotonic()
        if now > announced_at + pause or now > deadline:
            here = [rank for rank in range(world_size) if rank not in missing]
            hosts = sorted({store.get(_key(rank)).decode() for rank in here})
            text = describe_missing(missing, world_size, hosts, starter)
            if now > deadline:
                raise TimeoutError(f"{text}; nothing for {now - began:.0f} s")
            LOGGER.warning("%s", text)
            announced_at, pause = now, 10 * pause
        time.sleep(_POLL_SECONDS)


def reach(address: str, port: int, *, rank: int, starter: Starter, deadline: float) -> None:
    """Wait until rank 0, or torchrun's agent, listens; torch's own attempts can be neither seen nor interrupted.

    Args:
        address: Host to reach.
        port: Port of its store.
        rank: This rank, for the log.
        starter: Launcher that started it.
        deadline: When to give up, on the monotonic clock.

    Raises:
        TimeoutError: Nothing listens there.
    """
    announced_at, pause = time.monotonic(), ANNOUNCE_SECONDS
    while True:
        try:
            socket.create_connection((address, port), timeout=10).close()
        except OSError as error:
            now = time.monotonic()
            reason = f"which is not reachable: {describe(error)}"
            text = f"Rank {rank} waits for {address}:{port}, {reason}; {_WAY_OUT[starter]}"
            if now > deadline:
                raise TimeoutError(text) from error
            if now > announced_at + pause:
                LOGGER.warning("%s", text)
                announced_at, pause = now, 10 * pause
            time.sleep(_POLL_SECONDS)
        else:
            return


def _key(rank: int) -> str:
    return f"recipes_met_{rank}"
