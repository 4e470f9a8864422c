"""A run folder that a tool without links has copied: `last` and `best` are folders, files, dangling, or missing."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import execute

from recipes.checkpoint.manifest import find_content_fault, find_fault, read_manifest
from recipes.checkpoint.resume import find_checkpoint, newest_checkpoint
from recipes.checkpoint.retention import checkpoint_name, recover_interrupted, resolve_symlink, steps_on_disk

STEPS = (2, 4)


@pytest.fixture(scope="module")
def run(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("copied") / "run"
    settings = ["trainer.max_steps=4", "save_every=2", "eval_every=2", "checkpoint.keep_last=2"]
    assert execute(*overrides, *settings, f"hydra.run.dir={folder}") == 0
    return folder


def as_folders(run: Path, copy: Path) -> None:
    """Copy as `cp -rL`, `rsync -L` and object storage do."""
    shutil.copytree(run, copy)


def as_text(run: Path, copy: Path) -> None:
    """Copy as git and zip do where there are no links."""
    shutil.copytree(run, copy, symlinks=True)
    for name in ("last", "best"):
        target = os.readlink(copy / "checkpoints" / name)
        (copy / "checkpoints" / name).unlink()
        (copy / "checkpoints" / name).write_text(target)


def as_absolute(run: Path, copy: Path) -> None:
    """Copy links that were made absolute, from a folder that is gone."""
    shutil.copytree(run, copy, symlinks=True)
    for name in ("last", "best"):
        target = os.readlink(copy / "checkpoints" / name)
        (copy / "checkpoints" / name).unlink()
        (copy / "checkpoints" / name).symlink_to(f"/gone/checkpoints/{target}")


def without(run: Path, copy: Path) -> None:
    """Copy without links and empty folders; every file is read-only and new."""
    shutil.copytree(run, copy, symlinks=True)
    for path in [*copy.rglob("*")]:
        if path.is_symlink():
            path.unlink()
        elif path.is_file():
            os.utime(path, (1, 1))
            path.chmod(0o444)


TOOLS = [as_folders, as_text, as_absolute, without]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_copied_run_goes_on_and_last_and_best_are_right(
    tool: Callable[[Path, Path], None], run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    tool(run, copy)
    assert newest_checkpoint(copy) == (copy / "checkpoints" / checkpoint_name(4)).resolve()
    assert execute(f"resume={copy}", "trainer.max_steps=6") == 0
    output = capfd.readouterr().out
    assert "Could not" not in output
    folder = copy / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best", "last", checkpoint_name(4), checkpoint_name(6)]
    for name in ("last", "best"):
        assert os.readlink(folder / name) == checkpoint_name(6)
        assert find_fault(folder / name) is None


@pytest.mark.parametrize("tool", TOOLS[:3])
def test_a_named_link_of_a_copied_run_resumes(
    tool: Callable[[Path, Path], None], run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    tool(run, copy)
    assert execute(f"resume={copy}/checkpoints/last", "trainer.max_steps=5") == 0
    output = capfd.readouterr().out
    assert f"resumed from {copy}/checkpoints/{checkpoint_name(4)} at step 4" in output
    names = {path.name for path in (copy / "checkpoints").iterdir()}
    assert names == {"best", "last", checkpoint_name(4), checkpoint_name(5)}


def test_a_copy_that_is_the_only_checkpoint_of_its_step_is_kept_and_gets_its_name(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    as_folders(run, copy)
    folder = copy / "checkpoints"
    shutil.rmtree(folder / checkpoint_name(4))  # only `last` and `best` were copied
    assert newest_checkpoint(copy) == (folder / "last").resolve()
    assert find_checkpoint(str(copy), copy) == (folder / "last").resolve()
    recover_interrupted(folder)
    assert list(steps_on_disk(folder)) == list(STEPS)
    assert find_fault(folder / checkpoint_name(4)) is None
    assert resolve_symlink(folder / "last") == (folder / checkpoint_name(4)).resolve()
    assert (folder / "last").is_symlink()
    assert (folder / "best").is_symlink()


def test_a_damaged_copy_is_set_aside_and_a_whole_one_replaces_what_is_damaged(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    as_folders(run, copy)
    folder = copy / "checkpoints"
    (folder / "best/run.pt").unlink()
    (folder / checkpoint_name(4) / "rank_00000.safetensors").write_bytes(b"half")
    recover_interrupted(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "damaged_best",
        f"damaged_{checkpoint_name(4)}",
        "last",
        checkpoint_name(2),
        checkpoint_name(4),
    ]
    assert find_fault(folder / "last") is None
    recover_interrupted(folder)  # a second time changes nothing
    assert find_fault(folder / checkpoint_name(4)) is None


def flip(file: Path) -> None:
    """Flip one bit, which changes no size."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def is_whole(checkpoint: Path) -> bool:
    """Return whether every byte of a checkpoint is as it was written."""
    manifest = read_manifest(checkpoint)
    return manifest is not None and find_content_fault(checkpoint, manifest, manifest.files) is None


@pytest.mark.parametrize("flipped", [[checkpoint_name(4)], [checkpoint_name(4), "last"], [checkpoint_name(4), "best"]])
def test_a_flipped_bit_in_a_checkpoint_costs_no_whole_copy(flipped: list[str], run: Path, tmp_path: Path) -> None:
    """The hashes of a checkpoint are read before its copy is deleted."""
    copy = tmp_path / "copy"
    as_folders(run, copy)
    folder = copy / "checkpoints"
    for name in flipped:
        flip(folder / name / "rank_00000.safetensors")
    recover_interrupted(folder)
    assert is_whole(folder / checkpoint_name(4))
    assert not is_whole(folder / f"damaged_{checkpoint_name(4)}")
    # `last` is looked at first: by the turn of `best` the checkpoint is whole, and a copy of it is deleted
    damaged = {f"damaged_{name}" for name in flipped if name != "best"}
    links = {"last", "best"} - ({"last"} & set(flipped))
    assert {path.name for path in folder.iterdir()} == links | damaged | {checkpoint_name(2), checkpoint_name(4)}
    for name in links:
        assert os.readlink(folder / name) == checkpoint_name(4)
    assert newest_checkpoint(copy) == (folder / checkpoint_name(4)).resolve()


def test_where_every_copy_has_a_flipped_bit_each_is_kept(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    as_folders(run, copy)
    folder = copy / "checkpoints"
    for name in ("last", "best", checkpoint_name(4)):
        flip(folder / name / "run.pt")
    recover_interrupted(folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"damaged_last", "damaged_best", checkpoint_name(2), checkpoint_name(4)}
