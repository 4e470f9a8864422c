"""MemoryMonitor: peaks in GiB, the maximum over ranks; what is dumped when memory runs out."""

import multiprocessing
import os
import sys

import pytest
import torch
import torch.distributed as dist

from callbacks.memory.callback import MemoryMonitor, host_peak_bytes, read_peaks
from callbacks.ranks import max_over_ranks


def test_linux_counts_in_kib_and_macos_in_bytes() -> None:
    assert host_peak_bytes(2048, platform="linux") == 2 * 2**20
    assert host_peak_bytes(2048, platform="darwin") == 2048


def test_the_host_peak_rises_by_what_is_touched() -> None:
    device = torch.device("cpu")
    before = read_peaks(device)["memory/host_peak_gib"]
    with open("/proc/self/statm") as file:  # the peak may be above what is resident now
        resident_gib = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    block = torch.ones(int((before - resident_gib) * 2**30) + 2**28, dtype=torch.uint8)
    after = read_peaks(device)["memory/host_peak_gib"]
    assert after == pytest.approx(before + 0.25, abs=0.05)
    assert block.numel() > 0


def test_every_row_and_the_summary_have_the_host_peak(plain_module, make_trainer, read_column) -> None:
    monitor = MemoryMonitor()
    assert monitor.summary() == {"peak_memory_gib": None}
    make_trainer(callbacks=[monitor], log_every_n_steps=4).fit(plain_module())
    peaks = read_column("memory/host_peak_gib")
    assert len(peaks) == 2
    assert 0.05 < peaks[0] <= peaks[1] < 64
    assert monitor.summary() == {"peak_memory_gib": peaks[1]}


def _worker(rank: int, store: str, results: "multiprocessing.Queue[dict[str, float]]") -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results.put(max_over_ranks({"a": 1.0 + rank, "b": 5.0 - rank}, torch.device("cpu")))
    dist.destroy_process_group()


def test_two_ranks_agree_on_the_maximum(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    store = str(tmp_path / "store")
    ranks = [context.Process(target=_worker, args=(rank, store, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert found == [{"a": 2.0, "b": 5.0}] * 2


def test_there_is_no_state_to_save() -> None:
    assert MemoryMonitor().state_dict() == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_quarter_gib_on_the_device_is_in_both_peaks() -> None:
    device = torch.device("cuda", 0)
    before = read_peaks(device)["memory/allocated_peak_gib"]
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    peaks = read_peaks(device)
    assert peaks["memory/allocated_peak_gib"] >= max(before, 0.25)
    assert peaks["memory/reserved_peak_gib"] >= peaks["memory/allocated_peak_gib"]
    assert peaks["memory/alloc_retries"] == 0.0
    assert block.numel() == 2**28


def test_without_the_module_resource_there_is_no_host_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert read_peaks(torch.device("cpu")) == {}
