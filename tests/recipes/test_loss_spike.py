"""Faults injected into real runs: what is skipped, what is rolled back, and what the run looks like afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FaultAt
from support import TINY, CrashAt, composed_config, read_metrics, resolved, run_train

from recipes.build import build
from recipes.checkpoint import writer

# metrics that are computed, not measured
COMPUTED = ("step", "train/", "val/", "lr", "grad/", "precision/", "spike/")
BASE = (
    *TINY,
    "scheduler=constant",
    "optimizer.lr=1e-3",
    "callbacks=[grad_norm,loss_scale,loss_spike]",
    "callbacks.loss_spike.window=32",
    "callbacks.loss_spike.warmup_steps=16",
    "callbacks.loss_spike.snapshot_every=10",
    "callbacks.loss_spike.quarantine_steps=10",
    "log_every=1",
    "eval_every=40",
    "save_every=10",
    "seed=3",
)
OVERRIDES = tuple(override for override in BASE if not override.startswith("~"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def train(
    folder: Path, text_folder: str, *overrides: str, callbacks: tuple[Any, ...] = ()
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Run the training; return its rows and events."""
    config = composed_config(*OVERRIDES, f"data.path={text_folder}", *overrides)
    folder.mkdir(exist_ok=True)
    run = build(resolved(config, folder))
    run.trainer.callbacks[:0] = list(callbacks)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    return read_metrics(folder), read_events(folder)


def read_events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def select(events: list[dict[str, Any]], *names: str) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in events if event["event"] in names]


@pytest.mark.parametrize("kind", ["inputs", "nan_batch", "inf_gradient"])
@pytest.mark.parametrize(
    "overrides",
    [[], ["precision=bf16-mixed", "micro_batch_size=4"], ["optimizer=sgd", "optimizer.lr=1e-3"]],
    ids=["fused AdamW", "bf16, two micro-batches", "SGD"],
)
def test_a_skipped_step_changes_neither_weights_nor_optimizer_state(
    kind: Any, overrides: list[str], tmp_path: Path, text_folder: str
) -> None:
    class Recorded(FaultAt):
        """Copies the weights and optimizer state before and after the step with the fault."""

        before: list[torch.Tensor]
        after: list[torch.Tensor]

        def _copy_state(self, trainer: Any) -> list[torch.Tensor]:
            state = trainer.optimizers[0].state.values()
            tensors = [value for values in state for value in values.values() if torch.is_tensor(value)]
            weights = list(trainer.lightning_module.parameters())
            return [tensor.detach().clone() for tensor in [*weights, *tensors]]

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == self.step and not self.num_damaged:
                self.before = self._copy_state(trainer)
            if trainer.global_step == self.step + 1:
                self.after = self._copy_state(trainer)
            super().on_train_batch_start(trainer, *args)

    fault = Recorded(kind=kind, step=24)
    _, events = train(tmp_path, text_folder, *overrides, "trainer.max_steps=27", callbacks=(fault,))
    assert select(events, "skip") == [("skip", 25)]
    assert fault.num_damaged == 1
    assert all(torch.equal(*pair) for pair in zip(fault.before, fault.after, strict=True))


def test_float16_leaves_an_overflow_to_its_loss_scaler(tmp_path: Path, text_folder: str) -> None:
    overrides = ["precision=16-mixed", "trainer.max_steps=27"]
    fault = FaultAt(kind="inf_gradient", step=24)
    rows, events = train(tmp_path, text_folder, *overrides, callbacks=(fault,))
    assert select(events, "skip", "spike") == []
    assert [row["precision/overflow_steps"] for row in rows[23:26]] == [0, 1, 1]
    assert rows[25]["precision/loss_scale"] == rows[23]["precision/loss_scale"] / 2


def test_float16_skips_an_outlier_without_touching_its_loss_scale(tmp_path: Path, text_folder: str) -> None:
    class Large(FaultAt):
        def _inputs(self, trainer: Any, pl_module: Any, batch: Any) -> None:
            batch["num_targets"] = batch["num_targets"] / torch.tensor(1.5)

    overrides = [
        "precision=16-mixed",
        "trainer.max_steps=27",
        "callbacks.loss_spike.loss_threshold=6",
    ]
    fault = Large(kind="inputs", step=24)
    rows, events = train(tmp_path, text_folder, *overrides, callbacks=(fault,))
    assert select(events, "skip") == [("skip", 25)]
    assert {row["precision/loss_scale"] for row in rows} == {2.0**16}
    assert rows[-1]["precision/overflow_steps"] == 0


def test_a_corrupted_weight_is_rolled_back_and_the_run_keeps_its_number_of_steps(
    tmp_path: Path, text_folder: str
) -> None:
    fault = FaultAt(kind="weight", step=36)
    rows, events = train(tmp_path, text_folder, "trainer.max_steps=60", callbacks=(fault,))
    assert select(events, "rollback") == [("rollback", 30)]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert all(row["train/loss"] < 6 for row in rows)
    # the data continued: 16 steps' worth of samples count as read, but their steps were rolled back or skipped
    assert rows[-1]["train/samples"] == 8 * (60 + 16)
    assert [row["step"] for row in rows if "val/loss" in row] == [40, 60]
    saved = [step for _, step in select(events, "checkpoint")]
    assert sorted(saved) == [10, 20, 30, 30, 40, 40, 50, 60], "30 again, with the counts of the rollback"
    assert [path.name for path in (tmp_path / "checkpoints").glob("rolled_back*")] == ["rolled_back_0000040"]


@pytest.mark.parametrize("crash_at", [31, 41, 52], ids=["right after", "later", "much later"])
def test_a_resume_after_a_rollback_equals_no_resume_at_all(crash_at: int, tmp_path: Path, text_folder: str) -> None:
    overrides = ["trainer.max_steps=60", "model.dropout=0.1"]

    def fault() -> FaultAt:
        return FaultAt(kind="weight", step=36)

    class CrashLater(CrashAt):
        """Crash at that step only after the rollback."""

        has_rolled_back = False

        def on_rollback(self, *_: Any) -> None:
            self.has_rolled_back = True

        def on_train_batch_start(self, *args: Any) -> None:
            if self.has_rolled_back:
                super().on_train_batch_start(*args)

    expected = train(tmp_path / "uninterrupted", text_folder, *overrides, callbacks=(fault(),))
    folder = tmp_path / "stopped"
    with pytest.raises(OSError, match="crash"):
        train(folder, text_folder, *overrides, callbacks=(fault(), CrashLater(step=crash_at)))
    found = resume(folder, text_folder, *overrides)
    for row, other in zip(found[0], expected[0], strict=True):
        computed = {key: value for key, value in row.items() if key.startswith(COMPUTED)}
        assert computed == {k: v for k, v in other.items() if k.startswith(COMPUTED)}
    kinds = ("spike", "skip", "rollback", "checkpoint", "lr_backoff")
    # sorted: a background save may end at any time
    assert sorted(select(found[1], *kinds)) == sorted(select(expected[1], *kinds))
    resumed, uninterrupted = (
        torch.load(run / "checkpoints/last/run.pt", weights_only=True) for run in (folder, tmp_path / "uninterrupted")
    )
    assert resumed["callbacks"].keys() == uninterrupted["callbacks"].keys()
    key = next(key for key in resumed["callbacks"] if "LossSpike" in key)
    assert resumed["callbacks"][key] == uninterrupted["callbacks"][key]


def resume(folder: Path, text_folder: str, *overrides: str) -> Any:
    """Resume as `resume=auto` does."""
    from recipes.mode.fit import fit

    run = build(
        resolved(
            composed_config(
                *OVERRIDES,
                f"data.path={text_folder}",
                *overrides,
                "resume=auto",
                f"hydra.run.dir={folder}",
            ),
            folder,
        ),
    )
    assert fit(run) == 0
    return read_metrics(folder), read_events(folder)


def test_a_rollback_waits_for_a_save_in_progress(
    tmp_path: Path, text_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    write = writer.write_shard

    def slowly(path: Path, parts: Any) -> Any:
        time.sleep(0.5)
        return write(path, parts)

    monkeypatch.setattr(writer, "write_shard", slowly)
    fault = FaultAt(kind="weight", step=37)  # rolled back after 41, while 40 is being written
    rows, events = train(tmp_path, text_folder, "trainer.max_steps=45", "save_every=40", callbacks=(fault,))
    assert select(events, "rollback", "checkpoint") == [
        ("checkpoint", 40),
        ("rollback", 30),
        ("checkpoint", 30),
        ("checkpoint", 40),
        ("checkpoint", 45),
    ]
    assert [row["step"] for row in rows] == list(range(1, 46))
    assert (tmp_path / "checkpoints/last").resolve().name == "step_0000045.ckpt"


def test_a_run_that_keeps_diverging_exits_with_3_and_names_its_last_good_checkpoint(
    tmp_path: Path, text_folder: str
) -> None:
    folder = tmp_path / "run"
    ended = run_train(
        [
            *OVERRIDES,
            "~callbacks.grad_norm",
            f"data.path={text_folder}",
            f"hydra.run.dir={folder}",
            "trainer.max_steps=2000",
            "optimizer=sgd",
            "optimizer.lr=100",
            "optimizer.momentum=0",
            "optimizer.nesterov=false",
            "trainer.gradient_clip_val=null",
            "scheduler=linear",
            "warmup_steps=1000",
            "callbacks.loss_spike.max_rollbacks=2",
            "callbacks.loss_spike.lr_factor=0.9",
        ]
    )
    assert ended.returncode == 3, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "2 rollbacks in a row did not help" in ended.stderr + ended.stdout
    assert "the last good checkpoint is" in ended.stderr + ended.stdout
    events = read_events(folder)
    assert select(events, "stop", "end")[-1][0] == "end"
    assert len(select(events, "stop")) == 1
    assert len(select(events, "rollback")) == 2
    assert json.loads((folder / "summary.json").read_text())["status"] == "diverged"


def test_rows_after_a_rollback_are_of_complete_steps(tmp_path: Path, text_folder: str) -> None:
    fault = FaultAt(kind="weight", step=36)
    overrides = ["trainer.max_steps=60", "micro_batch_size=4"]
    rows, events = train(tmp_path, text_folder, *overrides, callbacks=(fault,))
    [(_, to_step)] = select(events, "rollback")
    assert [row["step"] for row in rows] == list(range(1, 61))
    norms = [row["grad/norm"] for row in rows]
    assert norms[to_step - 1] < 3 * norms[to_step - 2], "of its own step, not of one that was rolled back"


def test_a_weight_average_newer_than_the_snapshot_is_dropped_by_a_rollback(tmp_path: Path, text_folder: str) -> None:
    """The snapshot taken at the resume holds no average; the run can still roll back to it."""
    train(tmp_path / "first", text_folder, "trainer.max_steps=30", "save_every=30")
    fault = FaultAt(kind="weight", step=33)
    checkpoint = tmp_path / "first/checkpoints/step_0000030.ckpt"
    overrides = ["trainer.max_steps=80", f"resume={checkpoint}", "ema_decay=0.9"]
    _, events = train(tmp_path / "second", text_folder, *overrides, callbacks=(fault,))
    assert select(events, "rollback")[0] == ("rollback", 30)
