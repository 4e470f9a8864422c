"""A run ends when its validation no longer improves, and only where `patience` is set."""

import logging
from typing import Any

import pytest
import torch

from callbacks import EarlyStop


def module_with_val_losses(stranger: Any, values: list[float]) -> Any:
    class Scripted(stranger):  # type: ignore[misc, valid-type]
        def on_validation_epoch_end(self) -> None:
            self.log("val/loss", torch.tensor(values.pop(0)))

    return Scripted()


@pytest.mark.parametrize(("patience", "steps"), [(2, 4), (None, 8)])
def test_it_stops_after_patience_validations_without_an_improvement(
    stranger: Any, make_trainer: Any, patience: int | None, steps: int, caplog: Any
) -> None:
    callback = EarlyStop(patience=patience, monitor="val/loss", mode="min", min_delta=0.0)
    module = module_with_val_losses(stranger, [3.0, 2.0, 2.5, 2.0, 1.0, 0.9, 0.8, 0.7])
    with caplog.at_level(logging.WARNING, logger="lightning_recipes"):
        trainer = make_trainer(callbacks=[callback], limit_val_batches=1, val_check_interval=1)
        trainer.fit(module)
    assert trainer.global_step == steps
    assert ("the best was 2.0000" in caplog.text) == (patience is not None)


def test_its_patience_survives_a_resume(stranger: Any) -> None:
    first = EarlyStop(patience=3, monitor="val/loss", mode="min", min_delta=0.0)
    first.wait_count, first.best_score = 2, torch.tensor(1.5)
    second = EarlyStop(patience=3, monitor="val/loss", mode="min", min_delta=0.0)
    second.load_state_dict(first.state_dict())
    assert second.wait_count == 2
    assert float(second.best_score) == 1.5
