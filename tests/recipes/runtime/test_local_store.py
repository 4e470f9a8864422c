"""The ranks of one machine meet where no other machine can connect."""

import os
import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from recipes.runtime.local_store import bind_to_loopback, serve_local_ranks

LOOPBACK_ONLY = {"0100007F"}  # 127.0.0.1, as the kernel writes it


def listening_addresses(port: int) -> set[str]:
    """Return the addresses, in hexadecimal, on which some process of this machine listens at a port."""
    lines = [
        line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]
    ]
    places = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {address for address, hexadecimal in places if int(hexadecimal, 16) == port}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's table of sockets")
def test_the_store_of_local_ranks_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    serve_local_ranks()
    assert listening_addresses(port) == LOOPBACK_ONLY
    # as torch's rendezvous opens it in the process of rank 0, and in that of another rank
    wait = timedelta(seconds=20)
    first = TCPStore("127.0.0.1", port, 2, True, wait, wait_for_workers=False, multi_tenant=True)
    other = TCPStore("127.0.0.1", port, 2, False, wait)
    first.set("key", "value")
    assert other.get("key") == b"value"
    assert listening_addresses(port) == LOOPBACK_ONLY


def test_a_store_for_several_machines_stays_reachable() -> None:
    assert bind_to_loopback("node-1", 29500) == {"port": 29500}
    local = bind_to_loopback("localhost", 0)
    os.close(local["master_listen_fd"])
    assert local["port"] > 0


def test_upstream_a_store_by_itself_listens_on_every_interface() -> None:
    """torch 2.13 has no argument for the interface: when this fails, `bind_to_loopback` may be one line."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    [address] = listening_addresses(store.port)
    assert re.fullmatch("0{8}|0{32}", address)
