"""LossScaleMonitor with Lightning's own mixed precision, on a CPU in float16."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from callbacks import LossScaleMonitor


class RowModule(LightningModule):
    """Gathers its rows in `row`, as a module that is `SupportsRow` does."""

    def __init__(self, overflow_at: int | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.overflow_at = overflow_at
        self.row: dict[str, float] = {}
        self.rows: list[dict[str, float]] = []

    @property
    def recipes_row(self) -> dict[str, float]:
        return self.row

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        return loss * 1e38 if batch_idx == self.overflow_at else loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.rows += [self.row] if self.row else []
        self.row = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(10, 4), batch_size=2)  # type: ignore[arg-type]


def _fit(module: RowModule, monitors: Callback | list[Callback], *, scaled: bool) -> Trainer:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if scaled else []
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=plugins,
        callbacks=monitors,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module)
    return trainer


def test_a_step_that_overflows_is_counted_and_halves_the_scale() -> None:
    module, monitor = RowModule(overflow_at=2), LossScaleMonitor()
    _fit(module, monitor, scaled=True)
    assert [row["precision/overflow_steps"] for row in module.rows] == [0, 0, 1, 1, 1]
    assert [row["precision/loss_scale"] for row in module.rows] == [256, 256, 128, 128, 128]
    assert monitor.summary() == {"skipped_steps": 1}


def test_without_a_scaler_nothing_is_logged_and_nothing_counts_as_skipped() -> None:
    module, monitor = RowModule(overflow_at=None), LossScaleMonitor()
    _fit(module, monitor, scaled=False)
    assert module.rows == []
    assert monitor.summary() == {"skipped_steps": 0}


def test_a_resumed_run_continues_the_count() -> None:
    first, again = LossScaleMonitor(), LossScaleMonitor()
    _fit(RowModule(overflow_at=1), first, scaled=True)
    again.load_state_dict(first.state_dict())
    _fit(RowModule(overflow_at=3), again, scaled=True)
    assert again.summary() == {"skipped_steps": 2}


def test_a_rollback_to_a_lower_scale_is_no_overflow() -> None:
    class RollsBack(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.precision_plugin.scaler._scale.fill_(2.0**4)  # type: ignore[attr-defined]
                monitor.on_rollback(trainer, pl_module, 3, 1)

    monitor = LossScaleMonitor()
    _fit(RowModule(overflow_at=None), [monitor, RollsBack()], scaled=True)
    assert monitor.summary() == {"skipped_steps": 0}


def test_the_state_survives_a_round_trip() -> None:
    first, second = LossScaleMonitor(), LossScaleMonitor()
    _fit(RowModule(overflow_at=1), first, scaled=True)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() == {"overflow_steps": 1}
