"""Whatever happens to one file of a checkpoint, it is seen before it is loaded, and the checkpoint before is used."""

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
from recipes.entry.run import run_composed
from recipes.errors import ConfigError

FILES = ["manifest.json", "rank_00000.safetensors", "run.pt"]
NUM_FLIPS = 100


def load(path: Path, *, falls_back: bool, verify_hashes: bool = True) -> FolderCheckpointIO:
    """Load, and say through what."""
    writer = CheckpointWriter(asynchronous=False, after=lambda folder: None)
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


def refused(newest: Path, why: str) -> None:
    """The newest is refused, step 10 is used; where the newest was named, that is a mistake."""
    io = load(newest, falls_back=True)
    assert io.loaded == newest.with_name("step_0000010.ckpt")
    [refusal] = io.rejected
    assert refusal.path == newest
    assert why in refusal.why, refusal.why
    with pytest.raises(ConfigError, match="it was named") as raised:
        load(newest, falls_back=False)
    assert why in str(raised.value)


@pytest.fixture(scope="module")
def run_folder(train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with whole checkpoints of steps 10 and 20."""
    folder: Path = tmp_path_factory.mktemp("damage") / "run"
    assert train(folder).exit_code == 0
    return folder


@pytest.fixture
def newest(run_folder: Path, tmp_path: Path) -> Iterator[Path]:
    """The checkpoint of step 20, mended afterwards."""
    path = run_folder / "checkpoints/step_0000020.ckpt"
    shutil.copytree(path, tmp_path / "kept")
    yield path
    shutil.rmtree(path)
    (tmp_path / "kept").rename(path)


def test_both_are_loaded_while_they_are_whole(newest: Path) -> None:
    assert sorted(path.name for path in newest.iterdir()) == FILES
    io = load(newest, falls_back=True)
    assert io.loaded == newest
    assert io.rejected == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["truncated by one byte", "emptied", "deleted", "one byte longer"])
def test_a_file_of_another_size_is_always_seen(name: str, kind: str, newest: Path) -> None:
    path = newest / name
    content = path.read_bytes()
    if kind == "deleted":
        path.unlink()
    else:
        changed = {"emptied": b"", "one byte longer": content + b"\0"}
        path.write_bytes(changed[kind] if kind in changed else content[:-1])
    refused(newest, name)
    # no hash is needed for that
    io = load(newest, falls_back=True, verify_hashes=False)
    assert io.loaded == newest.with_name("step_0000010.ckpt")


def test_each_of_a_hundred_flipped_bits_is_seen(newest: Path) -> None:
    rng = random.Random(0)
    sizes = {name: (newest / name).stat().st_size for name in FILES}
    for number in range(NUM_FLIPS):
        name = FILES[number % len(FILES)]  # each file as often: by size, the small ones get none
        bit = rng.randrange(8 * sizes[name])
        flip(newest / name, bit)
        refused(newest, name)
        flip(newest / name, bit)
    assert load(newest, falls_back=False).loaded == newest


def test_without_hashes_a_flipped_bit_of_a_tensor_goes_through(newest: Path) -> None:
    """So that the test above is known to see the hashes at work."""
    shard = newest / "rank_00000.safetensors"
    flip(shard, 8 * shard.stat().st_size - 1)
    assert load(newest, falls_back=True, verify_hashes=False).loaded == newest


def test_files_of_another_checkpoint_are_not_this_ones(newest: Path) -> None:
    older = newest.with_name("step_0000010.ckpt")
    for name in FILES[1:]:
        kept = (newest / name).read_bytes()
        shutil.copy(older / name, newest / name)
        refused(newest, name)
        (newest / name).write_bytes(kept)


def test_where_none_is_whole_it_is_a_mistake_that_says_so(newest: Path) -> None:
    older = newest.with_name("step_0000010.ckpt")
    for path in (newest, older):
        flip(path / "run.pt", 999)
    with pytest.raises(ConfigError, match="run.pt is not what was written.*no older one is whole"):
        load(newest, falls_back=True)
    flip(older / "run.pt", 999)


def test_a_damaged_checkpoint_that_is_named_ends_with_2_and_three_clauses(
    newest: Path, run_words: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*run_words, f"resume={newest}", f"hydra.run.dir={tmp_path}/again"]
    for kind in ("by its content", "by its size"):
        if kind == "by its content":
            flip(newest / "run.pt", 999)
        else:
            (newest / "run.pt").write_bytes(b"short")
        composed, mistakes = compose_and_check([*words, "trainer.max_steps=30"])
        assert composed is not None
        assert not mistakes
        assert run_composed(composed) == 2
        said = capfd.readouterr().out
        assert "Traceback" not in said
        *_, setting, why, fix = said.splitlines()
        assert setting.startswith("1. resume=")
        assert str(newest) in setting
        assert "run.pt" in why, kind
        assert fix.startswith("   type: resume=")
        assert not (tmp_path / "again/checkpoints").exists()


def test_two_ranks_go_on_from_the_one_before_although_the_newest_is_at_the_last_step(
    run_words: list[str], tmp_path: Path
) -> None:
    """The very command again: without the look at its content there would be nothing to do."""
    command = [*run_words, "strategy=fsdp", "trainer.devices=2", "resume=auto"]
    command.append(f"hydra.run.dir={tmp_path}/run")
    first = run_train(command, folder=ROOT)
    assert first.returncode == 0, first.stdout + first.stderr
    rows = read_metrics(tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step_0000020.ckpt"
    shard = newest / "rank_00001.safetensors"
    flip(shard, 8 * shard.stat().st_size - 1)

    again = run_train(command, folder=ROOT)
    said = again.stdout
    assert again.returncode == 0, said + again.stderr
    assert "Nothing to do" not in said
    [line] = [line for line in said.splitlines() if "efused" in line]
    assert line == (
        f"Refused {newest}: rank_00001.safetensors is not what was written: another hash"
    )
    assert "step_0000010.ckpt at step 10" in said
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    [event] = [event for event in events if event["event"] == "checkpoint_rejected"]
    assert event["path"] == "step_0000020.ckpt"
    assert event["why"] == "rank_00001.safetensors is not what was written: another hash"
    computed = ("step", "train/", "val/", "lr")
    for row, other in zip(read_metrics(tmp_path / "run"), rows, strict=True):
        for name, value in other.items():
            if name.startswith(computed):
                assert row[name] == value, name
    # the step was saved again, whole
    assert load(newest, falls_back=False).loaded == newest


def test_a_resume_that_fails_leaves_the_run_as_it_was(
    newest: Path, run_folder: Path, run_words: list[str]
) -> None:
    flip(newest / "run.pt", 999)
    before = {
        path.relative_to(run_folder): path.read_bytes()
        for path in run_folder.rglob("*")
        if path.is_file() and path.name != "train.log"  # which says what was refused
    }
    words = [*run_words, "trainer.max_steps=30", f"resume={newest}", f"hydra.run.dir={run_folder}"]
    composed, _ = compose_and_check(words)
    assert composed is not None
    assert run_composed(composed) == 2
    after = {path: (run_folder / path).read_bytes() for path in before}
    assert [str(path) for path in before if after[path] != before[path]] == []
