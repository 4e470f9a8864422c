"""Threads of the ranks may wait a day for a message, and five minutes for a connection."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipes.runtime.host_group import connect_hosts


@pytest.fixture(autouse=True)
def _process_group(tmp_path: Path) -> Any:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_connects_within_minutes_and_then_waits_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    new_group, timeouts = dist.new_group, []

    def recorded(**arguments: Any) -> Any:
        group = new_group(**arguments)
        timeouts.append(group._get_backend(torch.device("cpu")).options._timeout)
        return group

    monkeypatch.setattr(dist, "new_group", recorded)
    group = connect_hosts()
    assert timeouts == [timedelta(minutes=5)]
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(days=1)


def test_hosts_that_do_not_reach_each_other_name_the_variable_that_chooses_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**arguments: Any) -> Any:
        raise dist.DistBackendError("Gloo connectFullMesh failed with timed out connecting: SO_ERROR")

    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(RuntimeError, match="within 5 minutes.*type export GLOO_SOCKET_IFNAME=") as caught:
        connect_hosts()
    assert isinstance(caught.value.__cause__, dist.DistBackendError)
