"""LossSpikeRollback in a plain Lightning project: no config, no recipes, Lightning's strategies and checkpoints."""

import inspect
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from callbacks import LossSpikeRollback
from callbacks.loss_spike import rollback
from callbacks.loss_spike.recovery import TrainingDivergedError

CONF = Path(__file__).parents[3] / "conf/callbacks/loss_spike.yaml"
SMALL: dict[str, Any] = {
    "action": "rollback",
    "min_rise": 0.0,
    "drift_threshold": 1.75,
    "window": 16,
    "warmup_steps": 8,
    "snapshot_every": 10,
    "quarantine_steps": 10,
}


class Damage(Callback):
    """Damages one batch (huge values, NaN) or the weights, once."""

    def __init__(self, *, at: int, what: str) -> None:
        self.at, self.what, self.is_done = at, what, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < self.at or self.is_done:
            return
        self.is_done = True
        with torch.no_grad():
            if self.what == "weight":
                pl_module.layer.weight += 50
            else:
                batch[0].mul_(1000 if self.what == "huge" else torch.nan)


@pytest.fixture
def noisy(plain_module: Any) -> Any:
    """Make a plain module with Adam on 60 batches of noise."""

    class Noisy(plain_module):  # type: ignore[misc, valid-type]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = (self.layer(batch[0]) - 1).square().mean()
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.003)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 60)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

        def train_dataloader(self) -> DataLoader[Any]:
            noise = torch.randn(60 * 8, 4, generator=torch.Generator().manual_seed(0))
            return DataLoader(TensorDataset(noise), batch_size=8)

    return Noisy


def test_the_defaults_are_those_of_the_config() -> None:
    """They are in both, because it can be constructed without a config; language models are judged more strictly."""
    node = yaml.safe_load(CONF.read_text())["loss_spike"]
    node.pop("_target_")
    signature = inspect.signature(LossSpikeRollback).parameters
    defaults = {name: parameter.default for name, parameter in signature.items() if name != "rewind_data"}
    strict = {"action": "rollback", "min_rise": 0.0, "drift_threshold": 1.75, "max_non_finite": 3}
    assert node == defaults | strict
    other = yaml.safe_load((CONF.parent / "classification.yaml").read_text())["loss_spike"]
    assert other == {name: defaults[name] for name in strict}


@pytest.mark.parametrize(
    "setting",
    [
        {"lr_factor": -1.0},
        {"lr_factor": 1.0},
        {"loss_threshold": 0.0},
        {"drift_threshold": -1.0},
        {"min_rise": -1.0},
        {"snapshot_every": 0},
        {"num_snapshots": 1},
        {"max_non_finite": -1},
        {"max_rollbacks": 0},
        {"action": "rollbak"},
        {"snapshot_storage": "ram"},
        {"window": 8},
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_an_error_that_names_it(setting: dict[str, Any]) -> None:
    [name] = setting
    with pytest.raises(ValueError, match=f"{name}={setting[name]}|a warm-up of 64 values needs a window"):
        LossSpikeRollback(**setting)


@pytest.mark.parametrize("what", ["huge", "nan"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_bad_batch_is_skipped(noisy: Any, make_trainer: Any, what: str, precision: str, read_column: Any) -> None:
    torch.manual_seed(0)
    module = noisy()
    spikes = LossSpikeRollback(**SMALL)
    make_trainer(callbacks=[Damage(at=30, what=what), spikes], precision=precision, gradient_clip_val=1.0).fit(module)
    assert spikes.summary() == {"rollbacks": 0, "skipped_steps": 1}
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    assert read_column("spike/skipped_steps")[-1] == 1


def test_an_overflow_of_float16_is_left_to_its_scaler(noisy: Any, make_trainer: Any) -> None:
    class Overflow(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step in (30, 31, 32, 33, 34):
                pl_module.layer.weight.grad.fill_(torch.inf)

    spikes = LossSpikeRollback(**SMALL)
    # Lightning creates no scaler on a CPU by itself
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024))
    trainer = make_trainer(callbacks=[Overflow(), spikes], plugins=[plugin])
    trainer.fit(noisy())
    assert spikes.summary() == {"rollbacks": 0, "skipped_steps": 0}
    assert trainer.precision_plugin.scaler.get_scale() == 1024 / 2**5
    assert trainer.global_step == 60


@pytest.mark.parametrize(
    ("action", "first_scale", "ends_at"),
    [("warn", 2.0**10, None), ("rollback", 2.0**10, None), ("warn", 2.0**-20, 18)],
)
def test_batches_that_overflow_float16_end_a_run_only_once_its_scaler_has_no_scale_left(
    noisy: Any, make_trainer: Any, action: str, first_scale: float, ends_at: int | None
) -> None:
    """At 2**-24 and below, gradients vanish: 30 halvings of 2**10 stay above it, 4 of 2**-20 reach it."""

    class Overflows(noisy):  # type: ignore[misc, valid-type]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (torch.inf if 10 <= batch_idx < 40 else 1)

    torch.manual_seed(0)
    module, spikes = Overflows(), LossSpikeRollback(**SMALL | {"action": action, "max_non_finite": 3})
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=first_scale))
    trainer = make_trainer(callbacks=[spikes], plugins=[plugin])
    if ends_at is None:
        trainer.fit(module)
        assert spikes.summary() == {"rollbacks": 0, "skipped_steps": 30}
        assert plugin.scaler.get_scale() == first_scale / 2**30
    else:
        with pytest.raises(TrainingDivergedError, match=f"step {ends_at}: .* NaN or inf in 4 steps in a row"):
            trainer.fit(module)
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


def test_a_damaged_weight_is_rolled_back(noisy: Any, make_trainer: Any, caplog: Any) -> None:
    torch.manual_seed(0)
    module = noisy()
    spikes = LossSpikeRollback(**SMALL)
    with caplog.at_level(logging.WARNING, logger="lightning_recipes"):
        trainer = make_trainer(callbacks=[Damage(at=35, what="weight"), spikes])
        trainer.fit(module)
    assert spikes.summary()["rollbacks"] == 1
    assert float(module.layer.weight.detach().abs().max()) < 5
    # rolled back from step 39 to step 20, while the data went on: that many fewer steps in the epoch
    assert trainer.global_step == 60 - (39 - 20)
    assert "Step 39: rolled back to step 20" in caplog.text
    schedule = trainer.lr_scheduler_configs[0].scheduler
    assert schedule.last_epoch == trainer.global_step


@pytest.mark.parametrize(("lasts", "done"), [("weight", ["rolled back"]), ("objective", ["rolled back", "treating"])])
def test_repair_applies_a_bad_batch_and_rolls_back_only_damage_that_lasts(
    noisy: Any, make_trainer: Any, caplog: Any, lasts: str, done: list[str]
) -> None:
    """From batch 30 on, the loss is a thousand times as high, or a weight damaged: it takes 8 of 16 steps to show."""

    class Level(noisy):  # type: ignore[misc, valid-type]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            is_high = batch_idx == 20 or (batch_idx >= 30 and lasts == "objective")
            return super().training_step(batch, batch_idx) * (1000 if is_high else 1)

    torch.manual_seed(0)
    module, spikes = Level(), LossSpikeRollback(**SMALL | {"action": "repair"})
    damage = [Damage(at=30, what="weight")] if lasts == "weight" else []
    with caplog.at_level(logging.WARNING, logger="lightning_recipes"):
        make_trainer(callbacks=[*damage, spikes]).fit(module)
    assert spikes.summary() == {"rollbacks": 1, "skipped_steps": 0}
    lines = [line for line in caplog.messages if "rolled back" in line or "treating the current level" in line]
    assert [next(word for word in done if word in line) for line in lines] == done
    assert lines[0].startswith("Step 38: rolled back to step 10")
    assert float(module.layer.weight.detach().abs().max()) < 5


def test_the_first_alarm_says_what_other_actions_would_have_done(noisy: Any, make_trainer: Any, caplog: Any) -> None:
    torch.manual_seed(0)
    damage = [Damage(at=at, what="huge") for at in (30, 40)]
    with caplog.at_level(logging.WARNING, logger="lightning_recipes"):
        make_trainer(callbacks=[*damage, LossSpikeRollback(**SMALL | {"action": "warn"})]).fit(noisy())
    [advice] = [line for line in caplog.messages if "action=skip would have skipped it" in line]
    assert advice.startswith("Step 31: the update was applied")
    assert "Step 41: loss" in caplog.text


def test_a_run_resumed_during_a_backoff_has_the_lower_learning_rate(
    noisy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    from callbacks.loss_spike.recovery import LearningRateBackoff

    class StartsBackoff(Callback):
        def __init__(self, spikes: LossSpikeRollback) -> None:
            self.backoff: LearningRateBackoff = spikes._recovery.lr_backoff

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 10:
                self.backoff.start(trainer, 0.5, end_step=10**6)
            if trainer.global_step == 20:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    class RecordsRates(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.seen.append(optimizer.param_groups[0]["lr"])

    torch.manual_seed(0)
    spikes, uninterrupted = LossSpikeRollback(**SMALL), RecordsRates()
    make_trainer(callbacks=[spikes, StartsBackoff(spikes), uninterrupted], max_steps=30).fit(noisy())
    resumed = RecordsRates()
    make_trainer(callbacks=[LossSpikeRollback(**SMALL), resumed], max_steps=30).fit(
        noisy(), ckpt_path=tmp_path / "half.ckpt"
    )
    assert resumed.seen == uninterrupted.seen[20:]
    assert uninterrupted.seen[10] < 0.6 * uninterrupted.seen[9]


def test_the_state_survives_a_round_trip_through_a_checkpoint_of_plain_data(
    noisy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(callbacks=[LossSpikeRollback(**SMALL)], max_steps=20)
    trainer.fit(noisy())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"]
    second = LossSpikeRollback(**SMALL)
    second.load_state_dict(state["LossSpikeRollback"])
    assert second.state_dict() == state["LossSpikeRollback"]


def test_a_debug_dump_is_written_for_a_plain_module(noisy: Any, make_trainer: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make_trainer(callbacks=[Damage(at=30, what="huge"), LossSpikeRollback(**SMALL)]).fit(noisy())
    folder = tmp_path / "run/spikes/step_0000031"
    content = json.loads((folder / "spike.json").read_text())
    assert content["skipped"] is True
    assert content["alarms"]["loss"]["kind"] == "spike"
    assert len(content["windows"]["loss"]) == 16
    [batch] = torch.load(folder / "rank_00000.pt", weights_only=True)["batches"]
    assert batch[0].shape == (8, 4)
    assert float(batch[0].abs().max()) > 500


def test_skip_batches_needs_a_datamodule_that_can_skip(noisy: Any, make_trainer: Any) -> None:
    with pytest.raises(MisconfigurationException, match="skip_batches=0"):
        make_trainer(callbacks=[LossSpikeRollback(skip_batches=10)]).fit(noisy())


def test_without_a_good_snapshot_it_stops_with_exit_code_3(noisy: Any, make_trainer: Any) -> None:
    """The first step is not finite, so that even the first snapshot is missing; outliers follow the warm-up."""
    torch.manual_seed(0)
    faults = [Damage(at=0, what="nan"), Damage(at=9, what="weight")]
    with pytest.raises(TrainingDivergedError, match="no good state") as raised:
        make_trainer(callbacks=[*faults, LossSpikeRollback(**SMALL)]).fit(noisy())
    assert raised.value.exit_code == 3


def test_twenty_one_nan_in_a_row_stop_the_run_with_the_weights_of_the_last_good_step(
    noisy: Any, make_trainer: Any
) -> None:
    class NanFrom(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 30:
                weights.append(pl_module.layer.weight.detach().clone())
            if batch_idx >= 30:
                batch[0].fill_(torch.nan)

    torch.manual_seed(0)
    module, weights = noisy(), list[Tensor]()
    spikes = LossSpikeRollback(**SMALL | {"action": "skip"})
    with pytest.raises(TrainingDivergedError, match="step 51: .* NaN or inf in 21 steps in a row"):
        make_trainer(callbacks=[NanFrom(), spikes]).fit(module)
    assert spikes.summary() == {"rollbacks": 0, "skipped_steps": 21}
    assert torch.equal(module.layer.weight, weights[0])


def test_seven_nan_batches_of_sixty_cost_seven_steps(noisy: Any, make_trainer: Any) -> None:
    torch.manual_seed(0)
    nans = [Damage(at=at, what="nan") for at in range(8, 60, 8)]
    spikes = LossSpikeRollback(**SMALL)
    trainer = make_trainer(callbacks=[*nans, spikes])
    trainer.fit(noisy())
    assert spikes.summary() == {"rollbacks": 0, "skipped_steps": 7}
    assert trainer.global_step == 60


def test_under_lightnings_ddp_both_ranks_skip_and_roll_back_together(tmp_path: Path) -> None:
    worker = Path(__file__).parents[1] / "third_party_ddp.py"
    results = tmp_path / "results.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), "-", str(results)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    first, second = json.loads(results.read_text())
    assert first == second, "weights to the last bit, counts and steps"
    _, summary, steps = first
    # one skip for the gradient of one rank, four for the damaged weight
    assert summary == {"rollbacks": 1, "skipped_steps": 5}
    assert steps < 60


def test_running_statistics_are_restored_after_a_skipped_step(noisy: Any, make_trainer: Any) -> None:
    class Normed(noisy):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    torch.manual_seed(0)
    module = Normed()
    spikes = LossSpikeRollback(**SMALL)
    make_trainer(callbacks=[Damage(at=30, what="nan"), spikes]).fit(module)
    assert spikes.summary()["skipped_steps"] == 1
    assert all(bool(buffer.isfinite().all()) for buffer in module.buffers())
    assert int(module.layer[0].num_batches_tracked) == 59


def test_a_batch_for_which_training_step_returns_none_is_no_spike(noisy: Any, make_trainer: Any) -> None:
    class SkipsBatches(noisy):  # type: ignore[misc, valid-type]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return None if batch_idx in (7, 30) else super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    spikes = LossSpikeRollback(**SMALL)
    make_trainer(callbacks=[spikes]).fit(SkipsBatches())
    assert spikes.summary() == {"rollbacks": 0, "skipped_steps": 0}


def test_lightnings_checkpoint_of_a_repeated_step_is_that_of_the_repetition(
    noisy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = noisy()
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=30, save_top_k=-1)
    seen: list[Tensor] = []

    class RecordsWeights(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 30:
                seen.append(pl_module.layer.weight.detach().clone())

    trainer = make_trainer(
        callbacks=[
            Damage(at=35, what="weight"),
            LossSpikeRollback(**SMALL),
            RecordsWeights(),
            saver,
        ],
        enable_checkpointing=True,
    )
    trainer.fit(module)
    assert len(seen) == 2
    newest = max(tmp_path.glob("step=30*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    saved = torch.load(newest, weights_only=True)["state_dict"]["layer.weight"]
    assert torch.equal(saved, seen[1])


@pytest.mark.parametrize("kind", ["sequential", "one cycle", "lambda"])
def test_a_backoff_applies_under_the_schedules_of_torch(kind: str) -> None:
    from types import SimpleNamespace

    from callbacks.loss_spike.recovery import LearningRateBackoff

    def make() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
        schedules = torch.optim.lr_scheduler
        if kind == "one cycle":
            return optimizer, schedules.OneCycleLR(optimizer, max_lr=1.0, total_steps=40)
        first = schedules.LambdaLR(optimizer, lambda step: 0.5 + step / 40)
        if kind == "lambda":
            return optimizer, first
        second = schedules.LambdaLR(optimizer, lambda step: 1 - step / 40)
        return optimizer, schedules.SequentialLR(optimizer, [first, second], [15])

    (plain, schedule), (lowered, lowered_schedule) = make(), make()
    trainer: Any = SimpleNamespace(
        optimizers=[lowered],
        lr_scheduler_configs=[SimpleNamespace(scheduler=lowered_schedule)],
    )
    backoff = LearningRateBackoff()
    for step in range(30):
        if step == 10:
            backoff.start(trainer, 0.5, end_step=20)
        backoff.end_if_due(trainer, step)
        factor = 0.5 if 10 <= step < 20 else 1.0
        expected = factor * plain.param_groups[0]["lr"]
        assert lowered.param_groups[0]["lr"] == pytest.approx(expected), step
        for optimizer, scheduler in ((plain, schedule), (lowered, lowered_schedule)):
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("snapshot_storage", ["auto", "memory"])
def test_snapshots_that_do_not_fit_go_to_disk_with_a_warning_or_are_an_error(
    noisy: Any,
    make_trainer: Any,
    tmp_path: Path,
    monkeypatch: Any,
    caplog: Any,
    snapshot_storage: Any,
) -> None:
    monkeypatch.setattr(rollback, "available_bytes", lambda: 100)
    on_disk: list[int] = []

    class CountsFiles(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            on_disk.append(len(list((tmp_path / "run/snapshots").rglob("*.bin"))))

    torch.manual_seed(0)
    module = noisy()
    spikes = LossSpikeRollback(**SMALL, snapshot_storage=snapshot_storage)
    trainer = make_trainer(callbacks=[Damage(at=35, what="weight"), spikes, CountsFiles()])
    if snapshot_storage == "memory":
        with pytest.raises(MisconfigurationException, match="snapshot_storage=disk"):
            trainer.fit(module)
        return
    with caplog.at_level(logging.WARNING, logger="lightning_recipes"):
        trainer.fit(module)
    assert "storing them on disk instead" in caplog.text
    assert spikes.summary()["rollbacks"] == 1
    # weight and bias, each with Adam's two moments and its step, in two snapshots
    assert max(on_disk) == 2 * 8
    assert not (tmp_path / "run/snapshots/rank_0").exists()


@pytest.mark.parametrize("is_policy", [True, False])
def test_the_first_loss_of_a_policy_that_was_0_is_no_spike(noisy: Any, make_trainer: Any, is_policy: bool) -> None:
    """Without a difference of rewards, loss and gradient are exactly 0: the first lesson was skipped as an outlier."""

    class Sparse(noisy):  # type: ignore[misc, valid-type]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (batch_idx > 40 and batch_idx % 3 == 0)  # type: ignore[no-any-return]

    if is_policy:
        Sparse.recipes_completions = lambda self, num_completions: []
    spikes = LossSpikeRollback(action="skip", window=30, warmup_steps=30)
    make_trainer(callbacks=[spikes]).fit(Sparse())
    assert (spikes.summary()["skipped_steps"] == 0) == is_policy


def test_a_policy_whose_loss_is_nan_is_skipped_as_any(noisy: Any, make_trainer: Any) -> None:
    class Policy(noisy):  # type: ignore[misc, valid-type]
        def recipes_completions(self, num_completions: int) -> list[dict[str, Any]]:
            return []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 40 else 1.0)  # type: ignore[no-any-return]

    spikes = LossSpikeRollback(window=30, warmup_steps=30)
    make_trainer(callbacks=[spikes]).fit(Policy())
    assert spikes.summary()["skipped_steps"] == 1
