"""What a rollback restores in someone else's project besides weights and moments, and what goes on."""

import csv
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from callbacks import GradNormMonitor, LossSpikeRollback

STEPS_PER_EPOCH = 20


class CountingSGD(torch.optim.SGD):
    """Holds optimizer state that is no tensor: a count and a list."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("seen", []).append(state["count"])
        return loss


class Shuffled(LightningModule):
    """Least squares on noise, shuffled again in every epoch; it is damaged once, in the second one."""

    def __init__(self, damaged_at: int = 35, make_optimizer: Any = CountingSGD) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.make_optimizer = make_optimizer
        self.damaged_at = damaged_at
        self.order: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.order.append(float(batch[0][0, 0]))
        if len(self.order) == self.damaged_at:
            with torch.no_grad():
                self.layer.weight += 50
        loss = (self.layer(batch[0]) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if self.make_optimizer is CountingSGD else {}
        return self.make_optimizer(self.parameters(), lr=0.01, **more)

    def train_dataloader(self) -> DataLoader[Any]:
        noise = torch.randn(STEPS_PER_EPOCH * 8, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(noise), batch_size=8, shuffle=True)


class Records(Callback):
    """Records a value after every step and every rollback, by step."""

    def __init__(self, read: Any) -> None:
        self.read = read
        self.seen: dict[int, list[Any]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.setdefault(trainer.global_step, []).append(self.read(trainer, pl_module))

    def on_rollback(self, trainer: Any, pl_module: Any, from_step: int, to_step: int) -> None:
        self.on_train_batch_end(trainer, pl_module)


@pytest.fixture
def rolled_back(make_trainer: Any) -> Any:
    """Train three epochs with other callbacks after LossSpikeRollback; it rolls back from step 38 to step 20."""

    def train(*callbacks: Callback, **arguments: Any) -> Any:
        torch.manual_seed(0)
        module = Shuffled()
        spikes = LossSpikeRollback(
            action="rollback", min_rise=0.0, window=16, warmup_steps=8, snapshot_every=10, quarantine_steps=10
        )
        trainer = make_trainer(callbacks=[spikes, *callbacks], max_epochs=3, **arguments)
        trainer.fit(module)
        assert spikes.summary() == {"rollbacks": 1, "skipped_steps": 4}
        assert trainer.global_step == 3 * STEPS_PER_EPOCH - 18
        return trainer

    return train


def test_shuffling_goes_on(rolled_back: Any) -> None:
    order = rolled_back().lightning_module.order
    epochs = [order[begin : begin + STEPS_PER_EPOCH] for begin in range(0, len(order), STEPS_PER_EPOCH)]
    assert len(epochs) == 3
    assert all(first != second for first, second in itertools.combinations(epochs, 2))


def test_optimizer_state_that_is_no_tensor_is_restored(rolled_back: Any) -> None:
    trainer = rolled_back()
    weight = trainer.lightning_module.layer.weight
    assert trainer.optimizers[0].state[weight]["count"] == trainer.global_step
    assert trainer.optimizers[0].state[weight]["seen"] == list(range(1, trainer.global_step + 1))


@pytest.mark.parametrize("make_optimizer", [partial(torch.optim.LBFGS, max_iter=1), torch.optim.Adafactor])
def test_an_optimizer_whose_state_has_its_own_structure_is_restored(make_optimizer: Any, make_trainer: Any) -> None:
    """LBFGS keeps lists of tensors, numbers and None under its first parameter; Adafactor None or factors."""

    def values(state: Any) -> Any:
        if isinstance(state, dict):
            return {key: values(value) for key, value in state.items()}
        if isinstance(state, list | tuple):
            return [values(value) for value in state]
        return state.tolist() if isinstance(state, Tensor) else state

    torch.manual_seed(0)
    module = Shuffled(make_optimizer=make_optimizer)
    spikes = LossSpikeRollback(
        action="rollback", min_rise=0.0, window=16, warmup_steps=8, snapshot_every=10, quarantine_steps=10
    )
    records = Records(lambda trainer, module: values(trainer.optimizers[0].state_dict()["state"]))
    trainer = make_trainer(callbacks=[spikes, records], max_epochs=3)
    trainer.fit(module)
    assert spikes.summary()["rollbacks"] == 1
    [step] = [step for step, states in records.seen.items() if len(states) > 1 and states[0] == states[1]]
    assert step > 0


@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="from Lightning 2.6 on")
def test_lightnings_weight_averaging_is_restored(rolled_back: Any) -> None:
    average = lightning_callbacks.EMAWeightAveraging(decay=0.9)
    records = Records(lambda trainer, module: average._average_model.module.layer.weight.detach().clone())
    rolled_back(average, records)
    assert all(float(value.abs().max()) < 5 for values in records.seen.values() for value in values[-1:])
    # step 20 is seen once more at the end of the batch that rolled back to it
    assert torch.equal(*records.seen[20])


def test_early_stopping_forgets_the_scores_of_undone_steps(rolled_back: Any) -> None:
    stopping = EarlyStopping("loss", mode="max", patience=10**6, check_on_train_epoch_end=True)
    records = Records(lambda trainer, module: float(stopping.best_score))
    rolled_back(stopping, records)
    assert len(set(records.seen[20])) == 1


def test_rows_of_other_loggers_have_the_numbers_of_the_steps(rolled_back: Any, tmp_path: Path) -> None:
    trainer = rolled_back(logger=CSVLogger(tmp_path, name="", version="rows"), log_every_n_steps=10)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == trainer.global_step
    with (tmp_path / "rows/metrics.csv").open(newline="") as file:
        steps = [int(row["step"]) + 1 for row in csv.DictReader(file)]
    # back to step 20 at the end of step 38, whose own row is not one of step 20
    assert steps == [10, 20, 30, *range(30, trainer.global_step + 1, 10)]


def test_a_row_of_an_undone_step_is_its_own_whatever_follows_in_the_list_of_callbacks(
    rolled_back: Any, tmp_path: Path
) -> None:
    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.log("step_of_others", float(trainer.global_step))

    rows = CSVLogger(tmp_path, name="", version="rows")
    rolled_back(Logs(), GradNormMonitor(), logger=rows, log_every_n_steps=1)
    with (tmp_path / "rows/metrics.csv").open(newline="") as file:
        found = [
            (int(row["step"]) + 1, float(row["step_of_others"]), float(row["grad/norm"]))
            for row in csv.DictReader(file)
        ]
    assert all(step == of_others for step, of_others, _ in found)
    norms = {step: [norm for number, _, norm in found if number == step] for step in (20, 38)}
    assert len(norms[20]) == 1  # the step that the run returned to
    assert len(norms[38]) == 2
    assert norms[38][0] > 20 * norms[38][1]  # the spike, and the repeated step


def test_what_callbacks_monitor_after_a_rollback_is_of_the_step_returned_to(rolled_back: Any) -> None:
    records = Records(lambda trainer, module: float(trainer.callback_metrics["loss"]))
    rolled_back(records)
    assert len(records.seen[20]) == 2
    assert len(set(records.seen[20])) == 1


def test_no_checkpoint_of_an_undone_step_stays_the_best_or_the_last(
    rolled_back: Any, tmp_path: Path, caplog: Any
) -> None:
    # the damage makes the loss of steps 35 to 38 the largest; every fourth step is saved
    saver = ModelCheckpoint(
        tmp_path, "{step}", monitor="loss", mode="max", save_top_k=2, every_n_train_steps=4, save_last=True
    )
    records = Records(lambda trainer, module: (saver.best_model_path, saver.last_model_path, set(saver.best_k_models)))
    rolled_back(records, saver, enable_checkpointing=True)
    undone = str(tmp_path / "step=36.ckpt")
    assert undone in records.seen[37][0][2]
    best, last, known = records.seen[20][-1]
    assert undone not in {best, last} | known
    assert all(Path(path).exists() for path in known | {best, last} if path)
    assert "No longer in the list of ModelCheckpoint" in caplog.text
    assert undone in caplog.text
    assert Path(undone).exists()


@pytest.mark.parametrize("kind", ["adam", "lbfgs", "16-mixed", "fused 16-mixed"])
def test_a_skipped_step_leaves_gradients_that_hooks_can_read_and_weights_as_they_were(
    kind: str, make_trainer: Any
) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    class Reads(Shuffled):
        def __init__(self) -> None:
            super().__init__(damaged_at=0)
            self.missing = 0
            self.before: dict[int, Tensor] = {}
            self.moved: dict[int, float] = {}

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx not in self.before:  # LBFGS calls it several times a step
                self.before[batch_idx] = self.layer.weight.detach().clone()
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if batch_idx == 12 else loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.missing += sum(parameter.grad is None for parameter in self.parameters())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.missing += sum(parameter.grad is None for parameter in self.parameters())
            self.moved[batch_idx] = float((self.layer.weight.detach() - self.before[batch_idx]).abs().max())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if kind == "lbfgs":
                return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2)
            return torch.optim.Adam(self.parameters(), lr=0.01, fused="fused" in kind)

    torch.manual_seed(0)
    module, spikes = Reads(), LossSpikeRollback()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    mixed = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]} if "16" in kind else {}
    trainer = make_trainer(callbacks=[spikes], max_epochs=1, **mixed)
    trainer.fit(module)
    assert spikes.summary()["skipped_steps"] == 1
    assert module.missing == 0
    unmoved = [number for number, distance in module.moved.items() if distance == 0]
    assert unmoved == [12]
    assert trainer.global_step == STEPS_PER_EPOCH
    optimizer = trainer.optimizers[0]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
