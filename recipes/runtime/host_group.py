"""Create a gloo process group for background threads, independent of the training backend.

Messages have a long timeout, for slow disks, but connecting has a short one: where a host name resolves to the
loopback address, as on many clusters, gloo on other nodes would otherwise retry just as long.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recipes.torch_internals import set_group_timeout

CONNECT_TIMEOUT = timedelta(minutes=5)
MESSAGE_TIMEOUT = timedelta(days=1)


def connect_hosts() -> Any:
    """Return a new process group of all ranks. A collective, on the training thread.

    Raises:
        RuntimeError: The ranks' hosts cannot reach each other.
    """
    try:
        group = dist.new_group(backend="gloo", timeout=CONNECT_TIMEOUT)
    except RuntimeError as error:
        minutes = CONNECT_TIMEOUT.total_seconds() / 60
        raise RuntimeError(
            f"{dist.get_world_size()} ranks: gloo has not connected them within {minutes:.0f} minutes, often because"
            " a host name resolves to 127.0.0.1; type export GLOO_SOCKET_IFNAME=<network interface that the nodes"
            " share, from `ip address`> on every node"
        ) from error
    set_group_timeout(MESSAGE_TIMEOUT, group)
    return group
