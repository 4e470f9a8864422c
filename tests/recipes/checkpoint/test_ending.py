"""Runs that end by themselves: they know why, their last step is complete, and they stay finished."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from signalled import events
from support import ROOT, TINY, StopAt, StopInWindow, execute, read_metrics

from callbacks.loss_scale import LossScaleMonitor
from recipes.checkpoint.ending import Endings
from recipes.checkpoint.manifest import read_manifest
from recipes.checkpoint.retention import steps_on_disk
from recipes.run_folder import read_summary

EARLY_STOP = ("callbacks.early_stop.patience=1", "callbacks.early_stop.min_delta=10")


@pytest.fixture
def train(tmp_path: Path, text_folder: str) -> Callable[..., int]:
    def run(*overrides: str) -> int:
        common = [*TINY, f"data.path={text_folder}", f"hydra.run.dir={tmp_path}", "resume=auto", "trainer.max_steps=9"]
        return execute(*common, "eval_every=2", "save_every=2", *overrides)

    return run


def summary(folder: Path) -> dict[str, Any]:
    found = read_summary(folder)
    assert found is not None
    return found


def newest(folder: Path) -> tuple[int, str | None]:
    """Return the step of the newest checkpoint, and what ended the run there."""
    [*_, path] = steps_on_disk(folder / "checkpoints").values()
    manifest = read_manifest(path)
    assert manifest is not None
    return manifest.step, None if manifest.ended is None else manifest.ended["by"]


def test_a_run_that_stopped_early_ends_well_without_a_logged_step_and_stays_finished(
    train: Callable[..., int], tmp_path: Path
) -> None:
    assert train(*EARLY_STOP, "log_every=100") == 0
    assert newest(tmp_path) == (4, "callbacks.early_stop")
    ended = summary(tmp_path)
    assert (ended["status"], ended["ended_by"], ended["steps"]) == ("finished", "callbacks.early_stop", 4)
    # the loss of the last step is known although its number is no multiple of log_every
    assert ended["train_loss"] == pytest.approx(read_metrics(tmp_path)[-1]["train/loss"], rel=1e-8)  # 9 digits
    assert read_metrics(tmp_path)[-1]["step"] == 4
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.name != "train.log")

    for _ in range(2):
        assert train(*EARLY_STOP, "log_every=100") == 0
    log = (tmp_path / "train.log").read_text().splitlines()
    assert "Nothing to do" in log[-2]
    assert "val/loss has not improved for 1 validation (callbacks.early_stop)" in log[-2]
    assert log[-1].startswith("Finished: 4 steps")
    after = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.name != "train.log")
    assert [path for path, _ in before if path.is_file()] == [path for path, _ in after if path.is_file()]
    assert [time for path, time in before if path.is_file() and path.name != ".lock"] == [
        time for path, time in after if path.is_file() and path.name != ".lock"
    ]

    # more patience: the two checks without an improvement count
    assert train("callbacks.early_stop.patience=3", "callbacks.early_stop.min_delta=10") == 0
    assert newest(tmp_path) == (8, "callbacks.early_stop")
    assert train() == 0  # without early stopping
    assert newest(tmp_path) == (9, "trainer.max_steps")
    assert summary(tmp_path)["ended_by"] == "trainer.max_steps"
    assert events(tmp_path, "end")[-1]["by"] == "trainer.max_steps"
    assert train("trainer.max_steps=10") == 0
    assert newest(tmp_path) == (10, "trainer.max_steps")


def test_a_stop_inside_an_accumulation_window_acts_at_the_end_of_its_step(
    train: Callable[..., int], tmp_path: Path
) -> None:
    # micro-batch 10 of 4 a step is the second one of step 3
    stop = ("+callbacks.stop._target_=support.StopInWindow", "+callbacks.stop.micro_batch=10")
    overrides = ("micro_batch_size=2", "eval_every=100", "save_every=100", "log_every=100")
    assert train(*overrides, *stop) == 0
    [row] = read_metrics(tmp_path)
    assert row["step"] == 3
    assert row["train/samples"] == 24
    assert "val/loss" in row
    assert newest(tmp_path) == (3, "callbacks")
    assert train(*overrides, *stop) == 0
    assert newest(tmp_path) == (3, "callbacks")
    assert train(*overrides) == 0  # the callback is removed
    assert newest(tmp_path) == (9, "trainer.max_steps")


def test_below_min_steps_a_stop_ends_nothing_and_a_signal_still_does(train: Callable[..., int], tmp_path: Path) -> None:
    least = (*EARLY_STOP, "trainer.min_steps=7")  # the check fails at step 4
    stop = ("+callbacks.signal._target_=signalled.SignalAt", f"+callbacks.signal.folder={tmp_path}")
    assert train(*least, *stop, "+callbacks.signal.signals=[step_5_SIGTERM_0]") == 75
    assert newest(tmp_path) == (5, "SIGTERM")
    steps = steps_on_disk(tmp_path / "checkpoints")
    manifests = {step: read_manifest(path) for step, path in steps.items()}
    assert {step: manifest.ended for step, manifest in manifests.items() if manifest and step < 5} == dict.fromkeys(
        (step for step in steps if step < 5), None
    )
    assert train(*least) == 0
    step, by = newest(tmp_path)
    assert by == "callbacks.early_stop"
    assert 7 <= step <= 8


def test_time_limits_count_all_starts_and_a_larger_one_goes_on(train: Callable[..., int], tmp_path: Path) -> None:
    slow = ("+callbacks.slow._target_=support.Slow", "+callbacks.slow.seconds=0.6")
    assert train(*slow, "trainer.max_time=00:00:00:02") == 0
    step, by = newest(tmp_path)
    assert by == summary(tmp_path)["ended_by"] == "trainer.max_time"
    assert 3 <= step <= 4
    # where the checkpoint is of a step in the middle, the time is known to be over once its state is loaded
    from_the_middle = (f"resume={tmp_path}/checkpoints/step_0000002.ckpt", "trainer.max_time=00:00:00:01")
    for overrides in (("trainer.max_time=00:00:00:02",), ("trainer.max_time=00:00:00:01",), from_the_middle):
        assert train(*slow, *overrides) == 0
        [*_, why, last] = (tmp_path / "train.log").read_text().splitlines()
        assert (
            f"is at step {2 if overrides is from_the_middle else step}: the time limit was reached (trainer.max_time)"
            in why
        )
        assert last.startswith(f"Finished: {step} steps")
    assert newest(tmp_path)[0] == step
    assert [event["event"] for event in map(json.loads, (tmp_path / "events.jsonl").open())].count("end") == 1
    assert train("trainer.max_time=00:01:00:00") == 0
    assert newest(tmp_path) == (9, "trainer.max_steps")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
def test_every_engine_ends_before_its_first_step_if_the_time_is_over(
    strategy: str, train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    ranks = (f"strategy={strategy}", "trainer.devices=2", "trainer.accelerator=cpu")
    slow = ("+callbacks.slow._target_=support.Slow", "+callbacks.slow.seconds=0.6")
    assert train(*ranks, *slow, "trainer.max_time=00:00:00:02") == 0
    step, by = newest(tmp_path)
    assert by == "trainer.max_time"
    assert train(*ranks, *slow, "trainer.max_time=00:00:00:01") == 0
    assert newest(tmp_path)[0] == step


def test_only_callbacks_that_may_stop_a_run_decide_whether_it_goes_on() -> None:
    stops, other = StopInWindow(micro_batch=3), LossScaleMonitor()
    trainer: Any = SimpleNamespace(global_step=4, max_steps=9, should_stop=True, callbacks=[stops, other])
    trainer.fit_loop = SimpleNamespace(_can_stop_early=True)

    def endings(settings: dict[str, Any], *more: str) -> Endings:
        nodes = {"callbacks.stop": {"micro_batch": 3}, "callbacks.loss_scale": {}} | settings
        known = {"callbacks.stop": stops, "callbacks.loss_scale": other} | dict.fromkeys(more, StopAt(step=1))
        return Endings(nodes, known)

    found = endings({}).find(trainer)
    assert found is not None
    ended = found.as_fields()
    assert ended["settings"] == {"callbacks.stop": {"micro_batch": 3}}
    assert endings({}).holds(ended)
    assert endings({"callbacks.loss_scale": {"new": 1.0}}).holds(ended)  # a cosmetic change
    assert not endings({"callbacks.stop": {"micro_batch": 4}}).holds(ended)
    assert not endings({"callbacks.more": {"step": 1}}, "callbacks.more").holds(ended)


def test_a_signal_is_not_final_and_an_unchanged_setting_is() -> None:
    endings = Endings({"trainer.max_steps": 9, "callbacks.stop": {"patience": 3}}, {})
    assert not endings.holds(None)  # of a checkpoint in the middle
    assert not endings.holds({"by": "SIGTERM", "why": "", "settings": {}})
    assert endings.holds({"by": "callbacks.stop", "why": "", "settings": {"callbacks.stop": {"patience": 3}}})
    assert not endings.holds({"by": "callbacks.stop", "why": "", "settings": {"callbacks.stop": {"patience": 4}}})
    assert not endings.holds({"by": "callbacks.gone", "why": "", "settings": {"callbacks.gone": {"patience": 3}}})
