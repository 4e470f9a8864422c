"""Which checkpoints stay on the disk; a half-deleted folder never has a checkpoint's name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.checkpoint.manifest import Manifest, find_fault
from recipes.checkpoint.retention import (
    Retention,
    apply,
    checkpoint_name,
    clean_up,
    recover_interrupted,
    remove,
    resolve_symlink,
    set_aside,
    steps_on_disk,
    update_symlink,
)

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: 4.0}
MEASURED = {step: {"val/loss": loss} for step, loss in LOSSES.items()}


def make_retention(
    *, keep_last: int = 1, keep_every: int | None = None, keep_best: int = 0, mode: str = "min"
) -> Retention:
    return Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        metric="val/loss",
        mode=mode,  # type: ignore[arg-type]
    )


def checkpoint(folder: Path, step: int, **metrics: float) -> Path:
    """Create a valid checkpoint without files."""
    manifest = Manifest(step=step, world_size=1, strategy="", versions={}, metrics=metrics, files={}, ended=None)
    path = folder / checkpoint_name(step)
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(manifest.text())
    return path


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (make_retention(keep_last=1), [50]),
        (make_retention(keep_last=2), [40, 50]),
        (make_retention(keep_last=9), [10, 20, 30, 40, 50]),
        (make_retention(keep_last=1, keep_every=20), [20, 40, 50]),
        (make_retention(keep_last=1, keep_best=1), [20, 50]),  # 20 and 40 are equal: the earlier
        (make_retention(keep_last=1, keep_best=2), [20, 40, 50]),
        (make_retention(keep_last=1, keep_best=3), [20, 30, 40, 50]),
        (make_retention(keep_last=1, keep_best=1, mode="max"), [50]),
        (make_retention(keep_last=1, keep_best=2, mode="max"), [10, 50]),
    ],
)
def test_the_newest_the_multiples_and_the_best_are_kept(retention: Retention, kept: list[int]) -> None:
    assert sorted(retention.get_kept(MEASURED)) == kept


def test_a_checkpoint_without_the_metric_is_never_the_best() -> None:
    metrics = {10: {"val/loss": 2.0}, 20: {"train/loss": 0.1}, 30: {}}
    assert make_retention(keep_best=2).get_best(metrics) == [10]
    assert make_retention(keep_best=2).get_best({20: {}}) == []


def test_of_equally_high_metrics_the_earlier_is_the_best() -> None:
    metrics = {10: {"val/loss": 1.0}, 20: {"val/loss": 5.0}, 30: {"val/loss": 5.0}}
    assert make_retention(keep_best=1, mode="max").get_best(metrics) == [20]


def test_a_checkpoint_with_a_nan_loss_is_never_the_best() -> None:
    for mode in ("min", "max"):
        for nan_at in (10, 20, 30):
            metrics = {step: {"val/loss": 1.0 + step} for step in (10, 20, 30)}
            metrics[nan_at] = {"val/loss": float("nan")}
            best = make_retention(keep_best=2, mode=mode).get_best(metrics)
            assert nan_at not in best, f"{mode}: {best}"


def test_apply_removes_the_others_and_links_the_best(tmp_path: Path) -> None:
    for step, loss in LOSSES.items():
        checkpoint(tmp_path, step, **{"val/loss": loss})
    damaged = tmp_path / checkpoint_name(5)
    damaged.mkdir()
    (tmp_path / "abandoned_0000060_1").mkdir()
    apply(make_retention(keep_last=1, keep_best=1), tmp_path)
    # folders without a manifest or with another name are not deleted
    assert list(steps_on_disk(tmp_path)) == [5, 20, 50]
    assert resolve_symlink(tmp_path / "best") == tmp_path / checkpoint_name(20)
    assert (tmp_path / "abandoned_0000060_1").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "abandoned_0000060_1",
        "best",
        *(checkpoint_name(step) for step in (5, 20, 50)),
    ]


def test_a_deletion_that_fails_halfway_leaves_no_folder_with_a_checkpoints_name(
    tmp_path: Path, make_undeletable: Callable[[Path], None]
) -> None:
    path = checkpoint(tmp_path, 10)
    make_undeletable(path)
    with pytest.raises(OSError, match="undeletable|file"):
        remove(path)
    assert steps_on_disk(tmp_path) == {}
    assert find_fault(path) == "there is no such folder"
    assert path.with_name("step_0000010.ckpt.trash").is_dir()


def test_clean_up_removes_the_leftovers_of_a_killed_run_and_nothing_else(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, 10)
    for name in ("step_0000020.ckpt.tmp", "step_0000005.ckpt.trash"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").write_bytes(b"half")
    update_symlink(tmp_path / "last", whole.name)
    (tmp_path / "last.tmp").symlink_to(whole.name)  # killed between link and rename
    (tmp_path / "notes").mkdir()
    clean_up(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "notes", whole.name]
    assert find_fault(whole) is None  # a link is removed, not what it names


def test_a_valid_checkpoint_that_was_set_aside_gets_its_name_back(tmp_path: Path) -> None:
    """After a kill between setting the old one aside and renaming the new one, or during a deletion."""
    for step in (10, 20, 30):
        set_aside(checkpoint(tmp_path, step))
    checkpoint(tmp_path, 20)  # the new one already has the name
    (tmp_path / "step_0000030.ckpt.trash/manifest.json").unlink()
    recover_interrupted(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        checkpoint_name(10),
        checkpoint_name(20),
        "step_0000020.ckpt.trash",
        "step_0000030.ckpt.trash",
    ]


def test_a_link_may_be_a_small_file_and_may_point_nowhere(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, 10)
    update_symlink(tmp_path / "last", whole.name)
    assert resolve_symlink(tmp_path / "last") == whole
    (tmp_path / "last").unlink()
    (tmp_path / "last").write_text(whole.name + "\n")  # as on a file system without links
    assert resolve_symlink(tmp_path / "last") == whole
    (tmp_path / "last").write_bytes(b"\xff\xfe")
    assert resolve_symlink(tmp_path / "last") is None
    update_symlink(tmp_path / "last", checkpoint_name(99))
    assert resolve_symlink(tmp_path / "last") is None
    assert resolve_symlink(tmp_path / "nowhere") is None


def test_only_last_and_best_are_read_as_links_and_only_their_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checkpoint(tmp_path, 10)
    shard = tmp_path / "shard.bin"
    shard.write_text(whole.name)
    assert resolve_symlink(shard) is None
    with (tmp_path / "last").open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading all of it would not end
    assert resolve_symlink(tmp_path / "last") is None
    update_symlink(tmp_path / "last", whole.name)
    assert resolve_symlink(tmp_path / "last") == whole

    def refuse(path: Path, mode: str) -> None:  # as for another user; root may read everything
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "best").write_text(whole.name)
    monkeypatch.setattr(Path, "open", refuse)
    assert resolve_symlink(tmp_path / "best") is None
