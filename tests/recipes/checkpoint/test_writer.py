"""One save at a time, kept only if valid; `last` always points to a valid one; a failure leaves later saves alone."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import CrashAt

from recipes.checkpoint.manifest import FileRecord, find_fault, read_manifest
from recipes.checkpoint.retention import (
    Retention,
    apply,
    checkpoint_name,
    resolve_symlink,
    steps_on_disk,
)
from recipes.checkpoint.shards import unsharded_part
from recipes.checkpoint.writer import CheckpointWriter, RankReport

KEEP_THREE = Retention(keep_last=3, keep_every=None, keep_best=0, metric="val/loss", mode="min")
WEIGHTS = {"weight": torch.arange(1000.0)}


def make_writer(*, async_save: bool = True) -> CheckpointWriter:
    return CheckpointWriter(async_save=async_save, after=lambda folder: apply(KEEP_THREE, folder))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("async_save", [True, False])
def test_a_successful_save_reports_its_path_size_and_times(save, tmp_path: Path, async_save: bool) -> None:
    outcome = save(make_writer(async_save=async_save), tmp_path, 10, WEIGHTS)
    assert outcome.is_valid
    assert outcome.path == tmp_path / checkpoint_name(10)
    files = [path for path in outcome.path.iterdir() if path.name != "manifest.json"]
    assert outcome.bytes == sum(path.stat().st_size for path in files)
    # a synchronous save is one stall; the clock is read a moment apart
    assert outcome.stall_seconds <= outcome.seconds + 0.1
    assert names(tmp_path) == ["last", checkpoint_name(10)]


def test_an_outcome_is_returned_once(save, tmp_path: Path) -> None:
    writer = make_writer()
    assert writer.poll() is None
    assert writer.poll(wait=True) is None
    save(writer, tmp_path, 10, WEIGHTS)
    assert writer.poll(wait=True) is None


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_checkpoint_with_nan_or_inf_is_discarded(save, tmp_path: Path, value: str) -> None:
    writer = make_writer()
    assert save(writer, tmp_path, 10, WEIGHTS).is_valid
    odd = {"fine": torch.ones(3), "odd": torch.tensor([1.0, float(value)])}
    outcome = save(writer, tmp_path, 20, odd)
    assert not outcome.is_valid
    assert outcome.rejected == "odd is not finite"
    assert outcome.error is None
    assert names(tmp_path) == ["last", checkpoint_name(10)]
    assert resolve_symlink(tmp_path / "last") == tmp_path / checkpoint_name(10)


def test_a_failed_save_leaves_nothing_behind_and_the_next_one_succeeds(save, tmp_path: Path) -> None:
    writer = make_writer()
    assert save(writer, tmp_path / "run", 10, WEIGHTS).is_valid
    (tmp_path / "file").touch()
    outcome = save(writer, tmp_path / "file", 20, WEIGHTS)
    assert outcome.error is not None
    assert outcome.error.startswith("Not a directory")
    assert outcome.rejected is None
    assert save(writer, tmp_path / "run", 30, WEIGHTS).is_valid
    assert names(tmp_path / "run") == ["last", checkpoint_name(10), checkpoint_name(30)]


def test_an_unsupported_dtype_is_a_failed_save(save, tmp_path: Path) -> None:
    writer = make_writer()
    outcome = save(writer, tmp_path, 10, {"odd": torch.ones(3, dtype=torch.complex64)})
    assert outcome.error is not None
    assert names(tmp_path) == []
    assert save(writer, tmp_path, 20, WEIGHTS).is_valid


def test_a_second_save_waits_for_the_first(save, tmp_path: Path) -> None:
    may_finish = threading.Event()
    writer = CheckpointWriter(async_save=True, after=lambda folder: wait_for(may_finish))
    began = time.monotonic()
    first = {"weight": unsharded_part(torch.ones(3))}
    thread = threading.Thread(target=save, args=(writer, tmp_path, 10, WEIGHTS))
    thread.start()
    while not (tmp_path / checkpoint_name(10)).exists():
        assert time.monotonic() - began < 60
        time.sleep(0.01)
    assert writer.poll() is None  # it is still cleaning up
    manifest = read_manifest(tmp_path / checkpoint_name(10))
    assert manifest is not None
    threading.Timer(0.3, may_finish.set).start()
    began = time.monotonic()
    writer.begin(tmp_path / checkpoint_name(20), {}, first, manifest)
    assert may_finish.is_set()
    assert time.monotonic() - began > 0.2  # of 0.3: the timer began a moment before
    thread.join()


def wait_for(event: threading.Event) -> None:
    assert event.wait(60)


def test_what_changes_after_wait_until_copied_is_not_in_the_checkpoint(save, tmp_path) -> None:
    """The checkpoint holds the weights of its step, whatever the optimizer does next."""
    writer = make_writer()
    save(writer, tmp_path, 10, WEIGHTS)
    manifest = read_manifest(tmp_path / checkpoint_name(10))
    assert manifest is not None
    weight = torch.zeros(1 << 20)
    for step in (20, 30, 40):
        writer.begin(tmp_path / checkpoint_name(step), {}, {"weight": unsharded_part(weight)}, manifest)
        writer.wait_until_copied()
        weight += 1
        outcome = writer.poll(wait=True)
        assert outcome is not None
        assert outcome.is_valid
        held = (tmp_path / checkpoint_name(step) / "rank_00000.safetensors").read_bytes()
        expected = torch.full((1 << 20,), float(step // 10 - 2))
        assert held.endswith(expected.numpy().tobytes())


def test_a_save_succeeds_if_old_checkpoints_cannot_be_removed(
    save, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    writer = CheckpointWriter(async_save=True, after=fail)
    assert save(writer, tmp_path, 10, WEIGHTS).is_valid
    assert "Old checkpoints could not be removed: Permission denied" in caplog.text


class Reader:
    """Reads `last` in a tight loop, as `resume=` of another process would."""

    def __init__(self, link: Path) -> None:
        self.link = link
        self.faults: list[str] = []
        self.num_reads = 0
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._thread.join()

    def _read(self) -> None:
        while not self.stopped.is_set():
            folder = resolve_symlink(self.link)
            fault = "there is no `last`" if folder is None else find_fault(folder)
            # three saves later the folder that was resolved is deleted: no fault if the link has moved on
            if fault is not None and folder == resolve_symlink(self.link):
                self.faults.append(fault)
            self.num_reads += 1


@pytest.fixture
def reader(save, tmp_path: Path) -> Iterator[Reader]:
    save(make_writer(), tmp_path, 10, WEIGHTS)
    with Reader(tmp_path / "last") as reader:
        yield reader


def test_last_always_points_to_a_valid_checkpoint(save, tmp_path: Path, reader: Reader) -> None:
    writer = make_writer()
    for step in range(11, 71):
        assert save(writer, tmp_path, step, WEIGHTS).is_valid
    reader.stopped.set()
    assert reader.num_reads > 60
    assert reader.faults == []
    assert list(steps_on_disk(tmp_path)) == [68, 69, 70]


def test_while_a_step_is_saved_again_it_always_has_a_valid_checkpoint(
    save, tmp_path: Path, make_undeletable: Callable[[Path], None]
) -> None:
    """As after a signal: the resumed run validates first and saves the step again with the metrics."""
    writer = make_writer()
    path = save(writer, tmp_path, 10, WEIGHTS).path
    make_undeletable(path)  # stands for anything that keeps the old one from being deleted, such as a kill
    save(writer, tmp_path, 10, WEIGHTS, metrics={"val/loss": 2.0})
    assert find_fault(path) is None
    assert resolve_symlink(tmp_path / "last") == path
    manifest = read_manifest(path)
    assert manifest is not None
    assert manifest.metrics == {"val/loss": 2.0}


def test_a_step_may_be_saved_again(save, tmp_path: Path) -> None:
    writer = make_writer()
    for loss in (3.0, 2.0):
        path = save(writer, tmp_path, 10, WEIGHTS, metrics={"val/loss": loss}).path
    manifest = read_manifest(path)
    assert manifest is not None
    assert manifest.metrics == {"val/loss": 2.0}
    assert names(tmp_path) == ["last", checkpoint_name(10)]


def test_a_save_fails_if_a_rank_writes_to_a_disk_of_its_own(
    save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are where rank 0 cannot see them."""
    elsewhere = RankReport(files={"rank_00001.safetensors": FileRecord(bytes=8, xxh3_128="0" * 32)})
    monkeypatch.setattr(
        "recipes.checkpoint.writer.gather_objects",
        lambda own, group: [own, elsewhere] if isinstance(own, RankReport) else [own],
    )
    outcome = save(make_writer(), tmp_path, 10, WEIGHTS)
    assert outcome.error is not None
    assert "rank_00001.safetensors is missing; hydra.run.dir=<a folder that all nodes share>" in outcome.error
    assert names(tmp_path) == []


def test_leftovers_of_a_killed_run_are_removed_when_it_resumes(train, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="crash at 12"):
        train(tmp_path, callbacks=[CrashAt(step=12)])
    folder = tmp_path / "checkpoints"
    complete = names(folder)
    assert complete == ["best", "last", checkpoint_name(10)]
    for name in ("step_0000020.ckpt.tmp", "step_0000005.ckpt.trash"):
        (folder / name).mkdir()
        (folder / name / "rank_00000.safetensors").write_bytes(b"half")
    (folder / "last.tmp").symlink_to(checkpoint_name(10))
    assert train(tmp_path, "resume=auto").exit_code == 0
    assert names(folder) == [*complete, checkpoint_name(20)]


def test_last_points_to_a_checkpoint_after_a_resume_from_an_earlier_one(train, tmp_path: Path) -> None:
    assert train(tmp_path).exit_code == 0
    folder = tmp_path / "checkpoints"
    with pytest.raises(OSError, match="crash at 12"):
        train(tmp_path, f"resume={folder / checkpoint_name(10)}", callbacks=[CrashAt(step=12)])
    assert list(steps_on_disk(folder)) == [10]
    assert resolve_symlink(folder / "last") == folder / checkpoint_name(10)
