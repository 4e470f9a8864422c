"""Snapshots in memory and in files, and which of them is restored."""

from pathlib import Path

import pytest
import torch
from fake_cuda import fake_streams
from torch._subclasses.fake_tensor import FakeTensorMode

from callbacks.loss_spike.snapshot import Snapshot, SnapshotRing
from callbacks.memory.host_memory import available_bytes


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "float32": torch.randn(5, 7, generator=generator),
        "bfloat16": torch.randn(9, generator=generator).bfloat16(),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "int": torch.arange(4),
    }


@pytest.mark.parametrize("in_files", [False, True])
def test_restored_tensors_equal_the_originals(in_files: bool, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "0" if in_files else None
    snapshot = Snapshot(folder)
    live = tensors()
    for _ in range(2):  # the buffers are reused
        snapshot.take(live.items())
        before = {name: tensor.clone() for name, tensor in live.items()}
        for tensor in live.values():
            tensor.fill_(7)
        snapshot.restore(live.items())
        assert all(torch.equal(tensor, before[name]) for name, tensor in live.items())
        live["float32"] += 1
    assert snapshot.num_bytes == sum(tensor.nbytes for tensor in live.values())
    if in_files:
        assert len(list((tmp_path / "snapshots/0").iterdir())) == 5, "an empty tensor needs no file"
    snapshot.drop()
    assert not (tmp_path / "snapshots/0").exists()


def test_a_tensor_newer_than_the_snapshot_is_named_and_not_changed() -> None:
    snapshot = Snapshot()
    snapshot.take([("one", torch.ones(2))])
    one, two = torch.zeros(2), torch.full((2,), 5.0)
    assert snapshot.restore([("one", one), ("two", two)]) == ["two"]
    assert one.tolist() == [1, 1]
    assert two.tolist() == [5, 5]


def test_only_snapshots_out_of_quarantine_are_good_and_the_good_one_outlives_the_next() -> None:
    ring = SnapshotRing(size=2, quarantine_steps=10)
    good: list[int | None] = []
    for clock in range(40):
        if clock % 10 == 0:
            snapshot = ring.oldest()
            snapshot.step = snapshot.taken_at = clock
        found = ring.good(clock)
        good.append(None if found is None else found.step)
    assert good == [None] * 10 + [0] * 10 + [10] * 10 + [20] * 10


def test_snapshots_newer_than_the_restored_one_are_dropped() -> None:
    ring = SnapshotRing(size=3, quarantine_steps=0)
    for clock in (10, 20, 30):
        snapshot = ring.oldest()
        snapshot.step = snapshot.taken_at = clock
    ring.drop_after(ring.held[1])
    assert [snapshot.step for snapshot in ring.held] == [10, 20]


def test_all_snapshots_of_a_ring_are_copied_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new stream would be the next of torch's 32, and soon one on which something else runs."""
    ring = SnapshotRing(size=2, quarantine_steps=0)
    with fake_streams() as streams, FakeTensorMode():
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(Snapshot, "_new_buffer", lambda self, number, tensor: torch.empty(tensor.shape))
        weight = torch.zeros(3, device=torch.device("cuda", 0))
        for clock in range(40):
            snapshot = ring.oldest()
            snapshot.take([("weight", weight), ("buffer/mean", weight)])
            snapshot.step = snapshot.taken_at = clock
    assert len(streams) == 1
    assert streams[0].wait_stream.call_count == 40 * 2, "after the training stream, and after the clone of a buffer"


def test_a_ring_of_one_snapshot_is_an_error() -> None:
    with pytest.raises(ValueError, match="overwritten"):
        SnapshotRing(size=1, quarantine_steps=5)


def test_available_memory_is_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert available_bytes(meminfo, cgroup) is None
    meminfo.write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    assert available_bytes(meminfo, cgroup) == 2048 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("900000\n")
    (cgroup / "memory.stat").write_text("anon 500000\ninactive_file 300000\n")
    assert available_bytes(meminfo, cgroup) == 400_000
    (cgroup / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, cgroup) == 2048 * 1024
