"""Real signals to a loader process, from its rank and from another process."""

import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from recipes.data.loader_process import SignalProofLoader, explain
from recipes.errors import ConfigError

SECONDS = 10.0
AT_FORK = {"starts_thread": False}


def _start_thread() -> None:
    """Start a thread before anything of torch runs, as OpenTelemetry does in whatever W&B's process forks."""
    if AT_FORK["starts_thread"]:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


os.register_at_fork(after_in_child=_start_thread)


@pytest.mark.parametrize("name", ["TERM", "USR1"])
@pytest.mark.parametrize("has_threads", [False, True])
def test_a_loader_process_ignores_foreign_signals_and_ends_at_sigterm_of_its_rank(
    name: str, has_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AT_FORK, "starts_thread", has_threads)
    loader = SignalProofLoader(range(100), batch_size=1, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert next(batches).tolist() == [0]
    [worker] = multiprocessing.active_children()
    assert worker.pid is not None
    subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    time.sleep(0.2)
    assert [int(batch) for batch in batches] == list(range(1, 100))
    assert worker.is_alive()
    os.kill(worker.pid, signal.SIGTERM)
    until = time.monotonic() + SECONDS
    while worker.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert not worker.is_alive()


class Unsendable:
    """Samples that leave a loader process as an object which cannot be pickled, from the second one on."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return threading.Lock() if index else index


def _as_is(samples: list[Any]) -> list[Any]:
    return samples


def test_a_sample_that_its_process_cannot_send_is_an_error_and_not_a_wait() -> None:
    loader = SignalProofLoader(Unsendable(), batch_size=1, num_workers=1, collate_fn=_as_is)
    batches = iter(loader)
    assert next(batches) == [0]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(batches)
    assert time.monotonic() - began < SECONDS  # torch looks for dead processes every five seconds


class Wrong:
    """Samples of data that is found to be wrong when it is read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        try:
            raise ConfigError("data.cause=1", "it is not this one", "nothing")
        except ConfigError as error:
            raise ConfigError("data.path=a: b", "token id 9: too large; or the type", "model.vocab_size=10") from error


def test_a_mistake_that_a_loader_process_finds_is_one_in_the_rank() -> None:
    with pytest.raises(ConfigError) as caught:
        next(iter(SignalProofLoader(Wrong(), batch_size=1, num_workers=1)))
    assert str(caught.value) == "data.path=a: b: token id 9: too large; or the type; type model.vocab_size=10"
    assert caught.value.fix == "model.vocab_size=10"
    for worker in multiprocessing.active_children():  # the traceback keeps its loader alive
        worker.kill()
        worker.join()


def test_samples_arrive_where_the_temporary_folder_is_too_deep_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 85)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(config, "tempdir", None)  # another test may have made one
    loader = SignalProofLoader(torch.arange(4), batch_size=2, num_workers=1)
    assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3]
    assert not list(deep.iterdir())

    monkeypatch.setitem(config, "tempdir", None)
    monkeypatch.setattr("recipes.data.loader_process._SHORT_FOLDERS", ())
    with pytest.raises(ConfigError, match="paths of sockets in it are longer than 107 bytes"):
        iter(SignalProofLoader(torch.arange(4), batch_size=2, num_workers=1)).__next__()


@pytest.mark.parametrize(
    "text",
    [
        "unable to allocate shared memory(shm) for file </torch_4362_791157048_0>: No space left on device (28)",
        "unable to write to file </torch_18692_1954506624>: No space left on device (28)",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of",
    ],
)
def test_shared_memory_that_is_too_small_is_named_with_what_to_type(text: str) -> None:
    mistake = explain(RuntimeError(text), num_workers=2)
    assert mistake is not None
    assert mistake.setting == "loader.num_workers=2"
    assert mistake.fix.startswith("loader.num_workers=0, or in a container a larger one: docker run --shm-size")
    assert explain(RuntimeError(text), num_workers=0) is None
    assert explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), num_workers=2) is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_mistake_found_in_a_sample_is_one_of_a_run_that_may_have_started(num_workers: int) -> None:
    class Damaged(Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise ConfigError("data.path=x", "it is damaged", "data.path=y")

    with pytest.raises(ConfigError) as caught:
        next(iter(SignalProofLoader(Damaged(), num_workers=num_workers)))
    assert caught.value.setting == "data.path=x"
    assert caught.value.late == "The run has ended: a sample of its data cannot be used."
