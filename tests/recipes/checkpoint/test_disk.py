"""Real full and read-only disks: no partial checkpoint remains, valid ones stay, training continues."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
from lightning.pytorch.callbacks import Callback
from support import read_metrics

from callbacks.sample_text import SampleText
from recipes.checkpoint.manifest import find_fault
from recipes.checkpoint.resume import newest_checkpoint
from recipes.config import compose_and_check
from recipes.entry.run import run_resolved
from recipes.run_folder import HOLDS_LOCK, LOCK_FILE

SIZE = "1300k"  # two checkpoints of 489 kB and everything else that a run writes; not three
SETTINGS = ["save_every=5", "eval_every=20", "checkpoint.keep_best=0"]


def _runs(*command: str) -> bool:
    found = shutil.which(command[0]) is not None
    return found and not subprocess.run(command, capture_output=True, check=False).returncode


MAY_MOUNT = _runs("unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt")
MAY_BE_ROOT = not MAY_MOUNT and _runs("unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt")
needs_mount = pytest.mark.skipif(not MAY_MOUNT, reason="mounting is for root, here or in unshare")


@pytest.mark.skipif(not MAY_BE_ROOT, reason="root needs no namespace, others may have none")
def test_the_tests_below_pass_as_root_of_a_namespace(tmp_path: Path) -> None:
    command = ["unshare", "-Urm", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, f"--basetemp={tmp_path}/inside", __file__],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert "skipped" not in ended.stdout.replace("1 skipped", "", 1), ended.stdout


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system that holds little more than two checkpoints."""
    path = tmp_path / "disk"
    path.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={SIZE}", "none", str(path))
    yield path
    subprocess.run(["umount", "-l", "-R", str(path)], check=True)  # the run's log is still open


class ActAfterSteps(Callback):
    """Calls a function after each of some steps."""

    def __init__(self, **actions: Callable[[], object]) -> None:
        self.actions = {int(name.removeprefix("step_")): act for name, act in actions.items()}
        self.seen = 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step != self.seen and trainer.global_step in self.actions:
            self.actions[trainer.global_step]()
        self.seen = trainer.global_step


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@needs_mount
def test_a_full_disk_loses_checkpoints_but_not_the_run(train, disk: Path) -> None:
    folder = disk / "run"
    ended = train(folder, *SETTINGS)
    assert ended.exit_code == 74  # its last state is not on the disk
    assert [row["step"] for row in read_metrics(folder)] == list(range(1, 21))
    failed = [line for line in ended.lines if line.startswith("Could not save")]
    assert len(failed) == 2
    for step, line in zip((15, 20), failed, strict=True):
        assert line.startswith(f"Could not save step_00000{step}.ckpt: No space left on device")
        assert line.endswith("make room or fix the disk, or checkpoint.keep_last=1. Earlier checkpoints stay")
    assert [event["path"] for event in events(folder, "checkpoint_failed")] == [
        "step_0000015.ckpt",
        "step_0000020.ckpt",
    ]
    assert names(folder) == ["last", "step_0000005.ckpt", "step_0000010.ckpt"]
    assert ended.lines[-1] == "The last checkpoint of this run, step_0000020.ckpt, was not written"
    [warning] = [line for line in ended.lines if line.startswith("Checkpoints take")]
    assert "not all of them will fit" in warning
    assert ended.lines.index(warning) < ended.lines.index(failed[0])

    # once there is room, the run resumes from the last valid checkpoint and finishes
    shutil.rmtree(folder / "checkpoints/step_0000005.ckpt")
    again = train(folder, *SETTINGS, "resume=auto", "save_every=10")
    assert again.exit_code == 0, again.lines
    assert newest_checkpoint(folder) == folder / "checkpoints/step_0000020.ckpt"


@needs_mount
def test_a_run_succeeds_if_the_disk_has_room_again_for_its_last_checkpoint(train, disk: Path) -> None:
    folder, filler = disk / "run", disk / "filler"
    fill = ActAfterSteps(step_7=lambda: filler.write_bytes(b"\0" * 500_000), step_12=lambda: filler.unlink())
    ended = train(folder, *SETTINGS, "checkpoint.keep_last=1", callbacks=[fill])
    assert ended.exit_code == 0, ended.lines
    failed = [line for line in ended.lines if line.startswith("Could not save")]
    assert len(failed) == 1
    assert failed[0].startswith("Could not save step_0000010.ckpt: No space left on device")
    assert names(folder) == ["last", "step_0000020.ckpt"]
    assert find_fault(folder / "checkpoints/last") is None
    assert ended.lines[-1].startswith("Finished: 20 steps")


@needs_mount
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_save_error_stop_ends_the_run_with_a_line_that_names_the_checkpoint(
    overrides: list[str], disk: Path, capfd: pytest.CaptureFixture[str], ranks: int
) -> None:
    folder = disk / "run"
    command = [*overrides, *SETTINGS, "checkpoint.on_save_error=stop", f"hydra.run.dir={folder}"]
    command += [f"trainer.devices={ranks}", "strategy=ddp"] if ranks > 1 else []
    composed, mistakes = compose_and_check(command)
    assert composed is not None
    assert not mistakes
    assert run_resolved(composed) == 74
    console = capfd.readouterr().out
    assert "Traceback" not in console
    assert console.count("Could not save step_0000015.ckpt") == 1
    last = console.splitlines()[-1]
    assert last.startswith(
        "checkpoint.on_save_error=stop: step_0000015.ckpt could not be written: No space left on device"
    )
    assert last.endswith(f"; the last good checkpoint is {folder}/checkpoints/step_0000010.ckpt")
    [end] = events(folder, "end")
    assert end["status"] == "failed"
    assert names(folder) == ["last", "step_0000005.ckpt", "step_0000010.ckpt"]
    assert len(events(folder, "checkpoint_failed")) == 1


@needs_mount
@pytest.mark.parametrize("on_save_error", ["continue", "stop"])
def test_a_checkpoints_folder_that_is_read_only_for_five_steps_loses_one_checkpoint(
    train, disk: Path, on_save_error: str
) -> None:
    folder = disk / "run"
    checkpoints = str(folder / "checkpoints")

    def forbid() -> None:
        _mount("--bind", checkpoints, checkpoints)
        _mount("-o", "remount,bind,ro", checkpoints)

    allow = lambda: subprocess.run(["umount", checkpoints], check=True)  # noqa: E731
    read_only = ActAfterSteps(step_7=forbid, step_12=allow)
    settings = [*SETTINGS, "checkpoint.keep_last=1", f"checkpoint.on_save_error={on_save_error}"]
    if on_save_error == "stop":
        ended = train(folder, *settings, callbacks=[read_only])
        assert ended.exit_code == 74
        assert "step_0000010.ckpt could not be written: Read-only file system" in ended.lines[-1]
        assert names(folder) == ["last", "step_0000005.ckpt"]
        return
    ended = train(folder, *settings, callbacks=[read_only])
    assert ended.exit_code == 0, ended.lines
    [line] = [line for line in ended.lines if line.startswith("Could not save")]
    assert line.startswith("Could not save step_0000010.ckpt: Read-only file system")
    assert names(folder) == ["last", "step_0000020.ckpt"]


@needs_mount
def test_a_disk_that_is_full_from_step_3_on_ends_nothing_and_refuses_the_next_start(
    overrides: list[str], train, disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, filler = disk / "run", disk / "filler"
    folder.mkdir()
    (folder / LOCK_FILE).write_text(f"{HOLDS_LOCK} 1")  # as every start of a run leaves it

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    samples = SampleText(prompts=list("abcdefgh"), num_tokens=16, every_n_steps=1)
    ended = train(folder, *SETTINGS, "save_every=10", callbacks=[samples, ActAfterSteps(step_3=fill)])
    console = capfd.readouterr().out
    assert ended.exit_code == 74  # the last checkpoint is missing
    assert "Traceback" not in console
    assert "Logging error" not in console
    for name in ("samples.jsonl", "train.log"):
        assert console.count(f"{folder}/{name} could not be written: No space left on device. The run goes on") == 1
    assert f"{folder}/samples.jsonl lacks its last" in console
    for name in ("samples.jsonl", "events.jsonl"):
        lines = (folder / name).read_text().splitlines()
        assert all(json.loads(line) for line in lines)
    assert [row["step"] for row in read_metrics(folder)] == list(range(1, len(read_metrics(folder)) + 1))

    composed, mistakes = compose_and_check([*overrides, *SETTINGS, "resume=auto", f"hydra.run.dir={folder}"])
    assert composed is not None
    assert not mistakes
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert run_resolved(composed) == 2
    assert "cannot be written: No space left on device" in capfd.readouterr().out
    assert [path for path in before if path.read_bytes() != before[path] and path.name != "train.log"] == []


def test_a_console_that_takes_no_line_ends_nothing(overrides: list[str], tmp_path: Path) -> None:
    """As where the console is a file on a disk that is full; Python itself would exit with 120."""
    command = [sys.executable, str(Path(__file__).parents[3] / "train.py"), *overrides, "trainer.max_steps=2"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*command, f"hydra.run.dir={tmp_path}/run"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    log = (tmp_path / "run/train.log").read_text()
    assert log.count("the console could not be written: No space left on device. The run goes on") == 1
    assert "Finished: 2 steps" in log


def test_a_run_writes_nothing_to_the_temporary_folder(
    train, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on another, smaller file system, from which a file cannot be renamed into the run folder."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() else tmp_path_factory.getbasetemp()
    elsewhere = base / f"recipes_{tmp_path.name}_{os.getpid()}"
    elsewhere.mkdir()
    try:
        for variable in ("TMPDIR", "TEMP", "TMP"):
            monkeypatch.setenv(variable, str(elsewhere))
        monkeypatch.setattr("tempfile.tempdir", None)  # computed again
        changed = elsewhere.stat().st_mtime_ns  # changes with every name created or removed
        assert train(tmp_path / "run", *SETTINGS).exit_code == 0
        assert elsewhere.stat().st_mtime_ns == changed
    finally:
        shutil.rmtree(elsewhere)
    assert find_fault(tmp_path / "run/checkpoints/step_0000020.ckpt") is None
