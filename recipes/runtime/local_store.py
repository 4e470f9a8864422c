"""torch's rendezvous on the loopback interface, for runs whose ranks are all on this machine."""

import os
import socket
from typing import TYPE_CHECKING, Any

# torch takes a second to import
if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_LOOPBACK = ("127.0.0.1", "localhost")
_OPEN_STORES: list["TCPStore"] = []  # a store must outlive the function that opens it


def bind_to_loopback(address: str, port: int) -> dict[str, Any]:
    """Return the arguments of a `TCPStore` server that listen for this machine alone, if all its clients are here.

    By itself the server listens on every interface, and whoever reaches it may read and write without a password
    (torch 2.13): the ranks' own addresses among them.

    Args:
        address: Address that the ranks connect to; none is changed unless it is that of the loopback interface.
        port: Port to listen on; 0 takes a free one.
    """
    if address not in _LOOPBACK:
        return {"port": port}
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    port = listener.getsockname()[1]
    return {"port": port, "master_listen_fd": listener.detach()}  # the store closes it


def serve_local_ranks() -> None:
    """Serve, on rank 0, the store of ranks that were started on this machine.

    torch opens a store at this address when it sets up the ranks, and finds in its own process the one that is open.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(
        address, is_master=True, wait_for_workers=False, multi_tenant=True, **bind_to_loopback(address, port)
    )
    _OPEN_STORES.append(store)
