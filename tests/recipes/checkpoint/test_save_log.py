"""The size of a checkpoint is known before the first is written, and too small a disk is reported at once."""

import shutil
from pathlib import Path

import pytest

from recipes.checkpoint.manifest import read_manifest


def _warnings(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("Checkpoints take")]


def _run_with_free(free: int, monkeypatch: pytest.MonkeyPatch, train, folder: Path, *, fits: bool = True) -> list[str]:
    """Return the warnings of a run of two steps on a disk with this many free bytes."""
    usage = shutil.disk_usage(folder)._replace(free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    settings = ["trainer.max_steps=2", "save_every=2", "eval_every=2"]
    ended = train(folder / str(free), *settings)
    assert ended.exit_code == (0 if fits else 74)
    return _warnings(ended.lines)


def test_the_space_that_checkpoints_need_is_known_after_the_first_step(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two newest, one best and one being written make four."""
    assert train(tmp_path / "first", "trainer.max_steps=10").exit_code == 0
    manifest = read_manifest(tmp_path / "first/checkpoints/step_0000010.ckpt")
    assert manifest is not None
    size = manifest.total_bytes
    # tensors alone are counted: run.pt and the header are some 4 % of a checkpoint as small as this
    assert _run_with_free(4 * size, monkeypatch, train, tmp_path) == []
    [line] = _run_with_free(int(3.5 * size), monkeypatch, train, tmp_path)
    assert "up to 4 are on the disk at a time" in line
    assert "not all of them will fit" in line
    [line] = _run_with_free(size // 2, monkeypatch, train, tmp_path, fits=False)
    assert "none of them will fit" in line


def test_checkpoints_already_on_the_disk_need_no_further_space(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert train(folder, "trainer.max_steps=20").exit_code == 0
    manifest = read_manifest(folder / "checkpoints/step_0000020.ckpt")
    assert manifest is not None
    usage = shutil.disk_usage(folder)._replace(free=2 * manifest.total_bytes)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    ended = train(folder, "resume=auto", "trainer.max_steps=30")
    assert ended.exit_code == 0
    assert _warnings(ended.lines) == []


def test_a_run_that_never_saves_needs_no_space(train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    ended = train(tmp_path / "run", "trainer.max_steps=2", "save_every=null")
    assert ended.exit_code == 0
    assert _warnings(ended.lines) == []
    assert not (tmp_path / "run/checkpoints").exists()
