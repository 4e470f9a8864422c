"""When checkpoints are written, and with which metrics."""

from pathlib import Path

from support import read_metrics

from recipes.checkpoint.retention import checkpoint_name, get_manifests, resolve_symlink


def test_a_time_based_save_at_a_validated_step_has_the_metrics_of_that_validation(train, tmp_path: Path) -> None:
    settings = ["save_every=null", "save_every_minutes=1e-9", "eval_every=4", "trainer.max_steps=8"]
    settings += ["checkpoint.keep_last=9", "checkpoint.keep_every=1"]
    assert train(tmp_path, *settings).exit_code == 0
    held = get_manifests(tmp_path / "checkpoints")
    assert {4, 8} <= set(held)
    assert set(held) & {2, 3, 6, 7}  # others are saved as well
    losses = {row["step"]: row["val/loss"] for row in read_metrics(tmp_path) if "val/loss" in row}
    assert list(losses) == [4, 8]
    for step, manifest in held.items():
        assert ("val/loss" in manifest.metrics) == (step in losses)
    best = min(losses, key=lambda step: losses[step])
    assert resolve_symlink(tmp_path / "checkpoints/best") == tmp_path / "checkpoints" / checkpoint_name(int(best))
