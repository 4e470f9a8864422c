"""Damage to any file of a checkpoint is detected before it is loaded, and the checkpoint before it is used."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT, read_metrics, run_train

from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.writer import CheckpointWriter
from recipes.config import compose_and_check
from recipes.entry.run import run_resolved
from recipes.errors import ConfigError

FILES = ["manifest.json", "rank_00000.safetensors", "run.pt"]
NUM_FLIPS = 100


def load(path: Path, *, falls_back: bool, verify_hashes: bool = True) -> FolderCheckpointIO:
    """Load a checkpoint; return the object that did."""
    writer = CheckpointWriter(async_save=False, after=lambda folder: None)
    io = FolderCheckpointIO(writer=writer, verify_hashes=verify_hashes)
    io.falls_back = falls_back
    io.load_checkpoint(path)
    return io


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        [byte] = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def assert_rejected(newest: Path, reason: str) -> None:
    """Check that step 10 is loaded instead of the newest, and that a named newest is a config error."""
    io = load(newest, falls_back=True)
    assert io.loaded == newest.with_name("step_0000010.ckpt")
    [rejection] = io.rejected
    assert rejection.path == newest
    assert reason in rejection.why, rejection.why
    with pytest.raises(ConfigError, match="it was named") as raised:
        load(newest, falls_back=False)
    assert reason in str(raised.value)


@pytest.fixture(scope="module")
def run_folder(train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with valid checkpoints of steps 10 and 20."""
    folder: Path = tmp_path_factory.mktemp("damage") / "run"
    assert train(folder).exit_code == 0
    return folder


@pytest.fixture
def newest(run_folder: Path, tmp_path: Path) -> Iterator[Path]:
    """Yield the checkpoint of step 20, and restore it afterwards."""
    path = run_folder / "checkpoints/step_0000020.ckpt"
    shutil.copytree(path, tmp_path / "copy")
    yield path
    shutil.rmtree(path)
    (tmp_path / "copy").rename(path)


@pytest.mark.parametrize("missing", [["events.jsonl"], ["metrics.csv"], ["events.jsonl", "metrics.csv"]])
def test_a_resume_goes_on_with_whatever_files_are_left(
    missing: list[str], train, run_folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run", symlinks=True)
    shutil.rmtree(run / "checkpoints/step_0000020.ckpt")
    for name in missing:
        (run / name).unlink()
    assert train(run, f"resume={run}").exit_code == 0
    first = 11 if "metrics.csv" in missing else 1
    assert [int(row["step"]) for row in read_metrics(run)] == [*range(first, 21)]


def test_an_undamaged_checkpoint_is_loaded(newest: Path) -> None:
    assert sorted(path.name for path in newest.iterdir()) == FILES
    io = load(newest, falls_back=True)
    assert io.loaded == newest
    assert io.rejected == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["truncated by one byte", "emptied", "deleted", "one byte longer"])
def test_a_file_of_the_wrong_size_is_rejected_even_without_hashes(name: str, kind: str, newest: Path) -> None:
    path = newest / name
    content = path.read_bytes()
    if kind == "deleted":
        path.unlink()
    else:
        changed = {"emptied": b"", "one byte longer": content + b"\0"}
        path.write_bytes(changed[kind] if kind in changed else content[:-1])
    assert_rejected(newest, name)
    # sizes alone show it
    io = load(newest, falls_back=True, verify_hashes=False)
    assert io.loaded == newest.with_name("step_0000010.ckpt")


def test_each_of_a_hundred_flipped_bits_is_detected(newest: Path) -> None:
    rng = random.Random(0)
    sizes = {name: (newest / name).stat().st_size for name in FILES}
    for number in range(NUM_FLIPS):
        name = FILES[number % len(FILES)]  # each file equally often: by size, the small ones would get none
        bit = rng.randrange(8 * sizes[name])
        flip(newest / name, bit)
        assert_rejected(newest, name)
        flip(newest / name, bit)
    assert load(newest, falls_back=False).loaded == newest


def test_without_hashes_a_flipped_bit_of_a_tensor_is_not_detected(newest: Path) -> None:
    """Proves that it is the hashes that the test above relies on."""
    shard = newest / "rank_00000.safetensors"
    flip(shard, 8 * shard.stat().st_size - 1)
    assert load(newest, falls_back=True, verify_hashes=False).loaded == newest


def test_a_file_of_another_checkpoint_is_rejected(newest: Path) -> None:
    older = newest.with_name("step_0000010.ckpt")
    for name in FILES[1:]:
        content = (newest / name).read_bytes()
        shutil.copy(older / name, newest / name)
        assert_rejected(newest, name)
        (newest / name).write_bytes(content)


def test_it_is_a_config_error_if_no_checkpoint_is_valid(newest: Path) -> None:
    older = newest.with_name("step_0000010.ckpt")
    for path in (newest, older):
        flip(path / "run.pt", 999)
    with pytest.raises(ConfigError, match="run.pt is corrupt: hash mismatch.*no other one is valid"):
        load(newest, falls_back=True)
    flip(older / "run.pt", 999)


def test_a_named_damaged_checkpoint_exits_with_2_and_an_error_of_three_clauses(
    newest: Path, overrides: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = [*overrides, f"resume={newest}", f"hydra.run.dir={tmp_path}/again"]
    for kind in ("by its content", "by its size"):
        if kind == "by its content":
            flip(newest / "run.pt", 999)
        else:
            (newest / "run.pt").write_bytes(b"short")
        composed, mistakes = compose_and_check([*command, "trainer.max_steps=30"])
        assert composed is not None
        assert not mistakes
        assert run_resolved(composed) == 2
        console = capfd.readouterr().out
        assert "Traceback" not in console
        *_, setting, reason, fix = console.splitlines()
        assert setting.startswith("1. resume=")
        assert str(newest) in setting
        assert "run.pt" in reason, kind
        assert fix.startswith("   type: resume=")
        assert not (tmp_path / "again/checkpoints").exists()


def test_two_ranks_resume_from_the_checkpoint_before_a_damaged_one_of_the_last_step(
    overrides: list[str], tmp_path: Path
) -> None:
    """The same command again: were the content not verified, there would be nothing left to do."""
    command = [*overrides, "strategy=fsdp", "trainer.devices=2", "resume=auto"]
    command.append(f"hydra.run.dir={tmp_path}/run")
    first = run_train(command, folder=ROOT)
    assert first.returncode == 0, first.stdout + first.stderr
    rows = read_metrics(tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step_0000020.ckpt"
    shard = newest / "rank_00001.safetensors"
    flip(shard, 8 * shard.stat().st_size - 1)

    again = run_train(command, folder=ROOT)
    console = again.stdout
    assert again.returncode == 0, console + again.stderr
    assert "Nothing to do" not in console
    [line] = [line for line in console.splitlines() if "ejected" in line]
    assert line == (f"Rejected {newest}: rank_00001.safetensors is corrupt: hash mismatch")
    assert "step_0000010.ckpt at step 10" in console
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    [event] = [event for event in events if event["event"] == "checkpoint_rejected"]
    assert event["path"] == "step_0000020.ckpt"
    assert event["why"] == "rank_00001.safetensors is corrupt: hash mismatch"
    computed = ("step", "train/", "val/", "lr")
    for row, other in zip(read_metrics(tmp_path / "run"), rows, strict=True):
        for name, value in other.items():
            if name.startswith(computed):
                assert row[name] == value, name
    # the step was saved again, and is valid
    assert load(newest, falls_back=False).loaded == newest


def test_a_failed_resume_leaves_the_run_folder_unchanged(newest: Path, run_folder: Path, overrides: list[str]) -> None:
    flip(newest / "run.pt", 999)
    before = {
        path.relative_to(run_folder): path.read_bytes()
        for path in run_folder.rglob("*")
        if path.is_file() and path.name != "train.log"  # which gains the error
    }
    command = [
        *overrides,
        "trainer.max_steps=30",
        f"resume={newest}",
        f"hydra.run.dir={run_folder}",
    ]
    composed, _ = compose_and_check(command)
    assert composed is not None
    assert run_resolved(composed) == 2
    after = {path: (run_folder / path).read_bytes() for path in before}
    assert [str(path) for path in before if after[path] != before[path]] == []
