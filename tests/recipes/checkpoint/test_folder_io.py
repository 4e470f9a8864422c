"""A checkpoint is whole or it is none."""

from pathlib import Path

import pytest
import torch

from recipes.checkpoint.folder_io import FolderCheckpointIO, is_whole
from recipes.checkpoint.resume import find_checkpoint, newest_checkpoint

STATE = {"global_step": 7, "state_dict": {"weight": torch.arange(5.0)}}


def save(run_folder: Path, step: int) -> Path:
    path = run_folder / "checkpoints" / f"step_{step:07d}.ckpt"
    FolderCheckpointIO().save_checkpoint(STATE | {"global_step": step}, path)
    return path


def test_what_is_saved_is_loaded_with_weights_only(tmp_path: Path) -> None:
    loaded = FolderCheckpointIO().load_checkpoint(save(tmp_path, 7))
    assert loaded["global_step"] == 7
    assert torch.equal(loaded["state_dict"]["weight"], torch.arange(5.0))


def test_saving_leaves_nothing_beside_the_checkpoint_and_may_replace_one(tmp_path: Path) -> None:
    save(tmp_path, 7)
    path = save(tmp_path, 7)
    assert [entry.name for entry in path.parent.iterdir()] == ["step_0000007.ckpt"]
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "state.pt"]


@pytest.mark.parametrize("damage", ["no manifest", "truncated", "no state"])
def test_a_torn_checkpoint_is_refused_and_the_one_before_is_used(
    tmp_path: Path, damage: str
) -> None:
    good, torn = save(tmp_path, 10), save(tmp_path, 20)
    if damage == "no manifest":
        (torn / "manifest.json").unlink()
    elif damage == "no state":
        (torn / "state.pt").unlink()
    else:
        (torn / "state.pt").write_bytes((torn / "state.pt").read_bytes()[:-1])
    assert not is_whole(torn)
    assert newest_checkpoint(tmp_path) == good
    with pytest.raises(ValueError, match="no whole checkpoint"):
        FolderCheckpointIO().load_checkpoint(torn)
    with pytest.raises(ValueError, match="no whole checkpoint in it"):
        find_checkpoint(str(torn), tmp_path)


def test_resume_finds_the_newest_the_named_or_none(tmp_path: Path) -> None:
    first, second = save(tmp_path, 10), save(tmp_path, 20)
    (tmp_path / "checkpoints" / "step_0000030.ckpt.tmp-1").mkdir()
    assert find_checkpoint(None, tmp_path) is None
    assert find_checkpoint("auto", tmp_path) == second
    assert find_checkpoint("auto", tmp_path / "elsewhere") is None
    assert find_checkpoint(str(tmp_path), tmp_path / "elsewhere") == second
    assert find_checkpoint(str(first), tmp_path) == first
    with pytest.raises(ValueError, match="no whole checkpoint"):
        find_checkpoint(str(tmp_path / "elsewhere"), tmp_path)
