"""Copies of tensors in memory and in files, and which of them is gone back to."""

from pathlib import Path

import pytest
import torch

from callbacks.host_memory import available_bytes
from callbacks.loss_spike.snapshot import Snapshot, SnapshotRing


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
def test_what_is_put_back_is_what_was_there(in_files: bool, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "0" if in_files else None
    snapshot = Snapshot(folder)
    live = tensors()
    for _ in range(2):  # the buffers are used again
        snapshot.take(live.items())
        before = {name: one.clone() for name, one in live.items()}
        for one in live.values():
            one.fill_(7)
        snapshot.put_back(live.items())
        assert all(torch.equal(one, before[name]) for name, one in live.items())
        live["float32"] += 1
    assert snapshot.num_bytes == sum(one.nbytes for one in live.values())
    if in_files:
        assert len(list((tmp_path / "snapshots/0").iterdir())) == 5, "an empty tensor needs no file"
    snapshot.drop()
    assert not (tmp_path / "snapshots/0").exists()


def test_a_tensor_that_has_come_since_is_named_and_left_alone() -> None:
    snapshot = Snapshot()
    snapshot.take([("one", torch.ones(2))])
    one, two = torch.zeros(2), torch.full((2,), 5.0)
    assert snapshot.put_back([("one", one), ("two", two)]) == ["two"]
    assert one.tolist() == [1, 1]
    assert two.tolist() == [5, 5]


def test_only_what_is_out_of_quarantine_is_gone_back_to_and_the_good_one_outlives_the_next() -> (
    None
):
    ring = SnapshotRing(size=2, quarantine_steps=10)
    good: list[int | None] = []
    for clock in range(40):
        if clock % 10 == 0:
            one = ring.oldest()
            one.step = one.taken_at = clock
        found = ring.good(clock)
        good.append(None if found is None else found.step)
    assert good == [None] * 10 + [0] * 10 + [10] * 10 + [20] * 10


def test_what_a_rollback_undoes_is_forgotten() -> None:
    ring = SnapshotRing(size=3, quarantine_steps=0)
    for clock in (10, 20, 30):
        one = ring.oldest()
        one.step = one.taken_at = clock
    ring.forget_after(ring.held[1])
    assert [one.step for one in ring.held] == [10, 20]


def test_one_snapshot_is_no_ring() -> None:
    with pytest.raises(ValueError, match="overwritten"):
        SnapshotRing(size=1, quarantine_steps=5)


def test_what_is_left_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
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
