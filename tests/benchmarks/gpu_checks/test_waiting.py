"""The record of synchronizations, with CUDA's report replaced: which steps, which lines, which verdict."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_checks.check import Settings, Skip
from gpu_checks.waiting import record_skip, spike_skip_without_sync

from callbacks.throughput.callback import SpeedMonitor


def _settings(folder: Path) -> Settings:
    return Settings(accelerator="cpu", is_tiny=True, num_gpus=0, memory_gib=None, folder=folder)


def test_reads_of_the_device_in_steps_without_a_row_are_recorded_with_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []
    read = torch.Tensor.tolist

    def reported(tensor: torch.Tensor) -> Any:
        if modes[-1:] == ["warn"]:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", reported)
    show, synchronize = warnings.showwarning, torch.cuda.synchronize
    outcome = record_skip(_settings(tmp_path), set_mode=modes.append)
    assert modes == ["warn", "default"]
    assert outcome.verdict == "fail"
    assert outcome.headline == "8 waits in 8 steps"  # on a CPU the detector reads loss and norm of every step at once
    [(line, count)] = outcome.figures["waits"].items()
    assert count == 8
    assert "callbacks/loss_spike/reader.py:" in line
    assert outcome.note == f"the host waits for the GPU 8 times at {line}"
    assert outcome.figures["skipped_steps"] == [15]
    assert (warnings.showwarning, torch.cuda.synchronize) == (show, synchronize), "as before"


def test_a_call_of_synchronize_is_a_wait_too_and_none_at_all_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    # as on a GPU, whose end of a batch is not known: a dump that is not written gives the stopwatch nothing to wait for
    monkeypatch.setattr(SpeedMonitor, "_synchronize", lambda self: torch.cuda.synchronize())
    unknown = property(lambda self: None, lambda self, seconds: None)
    monkeypatch.setattr(SpeedMonitor, "_idle_since", unknown, raising=False)
    (tmp_path / "a").mkdir()
    assert record_skip(_settings(tmp_path / "a"), set_mode=lambda mode: None).verdict == "pass"
    fetch = torch.nn.Embedding.forward

    def synchronizing(module: Any, tokens: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return fetch(module, tokens)

    monkeypatch.setattr(torch.nn.Embedding, "forward", synchronizing)
    (tmp_path / "b").mkdir()
    outcome = record_skip(_settings(tmp_path / "b"), set_mode=lambda mode: None)
    assert outcome.verdict == "fail"
    assert "test_waiting.py" in outcome.note


def test_a_cpu_is_skipped_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="CUDA alone reports"):
        spike_skip_without_sync(_settings(tmp_path))
