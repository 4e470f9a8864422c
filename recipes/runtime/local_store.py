"""Restrict torch's rendezvous to the loopback interface, for runs whose ranks are all on this machine."""

import os
import socket
from typing import TYPE_CHECKING, Any

# importing torch takes a second
if TYPE_CHECKING:
    from torch.distributed import TCPStore

_LOOPBACK = ("127.0.0.1", "localhost")
_OPEN_STORES: list["TCPStore"] = []  # keeps stores alive after the function that opens them


def bind_to_loopback(address: str, port: int) -> dict[str, Any]:
    """Return `TCPStore` server arguments to listen only on loopback, if all clients are on this machine.

    By default the server listens on every interface, and anyone who can reach it may read and write without a
    password (torch 2.13), including the ranks' own addresses.

    Args:
        address: Address that the ranks connect to; arguments change only for a loopback address.
        port: Port to listen on; 0 picks a free one.
    """
    if address not in _LOOPBACK:
        return {"port": port}
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    port = listener.getsockname()[1]
    return {"port": port, "master_listen_fd": listener.detach()}  # the store closes it


def serve_local_ranks() -> None:
    """On rank 0, serve the store for ranks that were started on this machine.

    When torch later opens a store at this address, it finds the one already open in this process.
    """
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(
        address, is_master=True, wait_for_workers=False, multi_tenant=True, **bind_to_loopback(address, port)
    )
    _OPEN_STORES.append(store)
