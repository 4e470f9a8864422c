"""When checkpoints are written, and with which metrics."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support import read_metrics

from recipes.checkpoint.retention import checkpoint_name, get_manifests, resolve_symlink
from recipes.checkpoint.saver import CheckpointSaver
from recipes.config.instantiate import make
from recipes.errors import ConfigError


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


@pytest.mark.parametrize(("metric", "is_known"), [("val/f1", True), ("val/f2", False), ("f1", False), ("x/y", True)])
def test_a_best_metric_that_the_first_validation_lacks_ends_the_run(
    metric: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointSaver, "saves", True)  # a run that saves nothing has no best
    monkeypatch.setattr(CheckpointSaver, "_save_if_due", lambda saver, trainer: None)
    node = {"_target_": "recipes.checkpoint.saver.CheckpointSaver", "save_every": None, "save_every_minutes": None}
    node |= {"keep_last": 1, "keep_every": None, "monitor": metric, "mode": "max"}
    node |= {"async_save": False, "verify_hashes": True, "on_save_error": "stop"}
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), global_step=3, callback_metrics={"val/f1": 0.5}, _results=None
    )
    ignoring: CheckpointSaver = make(node | {"keep_best": 0})
    ignoring.on_validation_end(trainer, None)  # type: ignore[arg-type]
    saver: CheckpointSaver = make(node | {"keep_best": 1})
    if is_known:
        saver.end_validation(trainer, None)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=f"checkpoint.monitor={metric}: validation measures val/f1"):
        saver.end_validation(trainer, None)  # type: ignore[arg-type]
