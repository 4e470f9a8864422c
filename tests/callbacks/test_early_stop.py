"""Training stops when the monitored metric stops improving, but only if `patience` is set."""

import logging
import math
from typing import Any

import pytest
import torch

from callbacks import EarlyStop


def module_with_val_losses(plain_module: Any, values: list[float]) -> Any:
    class FixedValLosses(plain_module):  # type: ignore[misc, valid-type]
        def on_validation_epoch_end(self) -> None:
            self.log("val/loss", torch.tensor(values.pop(0)))

    return FixedValLosses()


@pytest.mark.parametrize(("patience", "expected_steps"), [(2, 4), (None, 8)])
def test_stops_after_patience_validations_without_improvement(
    plain_module: Any, make_trainer: Any, patience: int | None, expected_steps: int, caplog: Any
) -> None:
    callback = EarlyStop(patience=patience, monitor="val/loss", mode="min", min_delta=0.0)
    module = module_with_val_losses(plain_module, [3.0, 2.0, 2.5, 2.0, 1.0, 0.9, 0.8, 0.7])
    with caplog.at_level(logging.WARNING, logger="lightning_recipes"):
        trainer = make_trainer(callbacks=[callback], limit_val_batches=1, val_check_interval=1)
        trainer.fit(module)
    assert trainer.global_step == expected_steps
    assert ("the best was 2.0000" in caplog.text) == (patience is not None)


@pytest.mark.parametrize(
    ("limits", "expected_steps", "why"),
    [
        ({"stopping_threshold": 1.5}, 4, "val/loss is 1, better than stopping_threshold=1.5, the best was 2.0000"),
        ({"divergence_threshold": 2.75}, 6, "val/loss is 9, worse than divergence_threshold=2.75, the best was 1.0000"),
        ({"stopping_threshold": 0.5, "divergence_threshold": 20.0}, 8, None),
        (
            {"stopping_threshold": 0.5, "patience": 2},
            6,
            "val/loss has not improved for 2 validations, the best was 1.0000",
        ),
        ({"monitor": "absent", "stopping_threshold": 0.5, "strict": False}, 8, None),
    ],
)
def test_a_run_ends_at_a_goal_or_a_limit_with_or_without_patience(
    plain_module: Any, make_trainer: Any, caplog: Any, limits: dict[str, Any], expected_steps: int, why: str | None
) -> None:
    callback = EarlyStop(**{"monitor": "val/loss", "patience": None} | limits)
    module = module_with_val_losses(plain_module, [2.7, 2.5, 2.0, 1.0, 1.5, 9.0, 9.0, 9.0])
    with caplog.at_level(logging.WARNING, logger="lightning_recipes"):
        trainer = make_trainer(callbacks=[callback], limit_val_batches=1, val_check_interval=1)
        trainer.fit(module)
    assert trainer.global_step == expected_steps
    lines = [line for line in caplog.messages if "the run ends" in line]
    assert lines == ([] if why is None else [f"Step {expected_steps}: {why}; the run ends"])


def test_the_count_and_the_best_score_survive_a_resume() -> None:
    saved = EarlyStop(patience=3, monitor="val/loss", mode="min", min_delta=0.0)
    saved.wait_count, saved.best_score = 2, torch.tensor(1.5)
    resumed = EarlyStop(patience=3, monitor="val/loss", mode="min", min_delta=0.0)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.wait_count == 2
    assert float(resumed.best_score) == 1.5


def test_a_first_nan_is_reported_as_a_nan(plain_module: Any, make_trainer: Any, caplog: Any) -> None:
    callback = EarlyStop(patience=3, monitor="val/loss")
    trainer = make_trainer(callbacks=[callback], limit_val_batches=1, val_check_interval=1)
    trainer.fit(module_with_val_losses(plain_module, [3.0, math.nan, 1.0]))
    assert trainer.global_step == 2
    assert "Step 2: val/loss is nan, the best was 3.0000; the run ends" in caplog.text
    assert "not improved" not in caplog.text
    patient = EarlyStop(patience=2, monitor="val/loss", check_finite=False)
    trainer = make_trainer(callbacks=[patient], limit_val_batches=1, val_check_interval=1)
    trainer.fit(module_with_val_losses(plain_module, [3.0, math.nan, 2.0, 1.0, 0.9, 0.8, 0.7, 0.6]))
    assert trainer.global_step == 8


def test_a_run_without_validation_is_checked_after_each_epoch(
    plain_module: Any, make_trainer: Any, caplog: Any
) -> None:
    callback = EarlyStop(patience=2, monitor="flat")
    module = plain_module()
    module.on_train_epoch_end = lambda: module.log("flat", 1.0)
    trainer = make_trainer(callbacks=[callback], limit_val_batches=0, max_epochs=9)
    trainer.fit(module)
    assert trainer.global_step == 3 * 8
    assert "flat has not improved for 2 epochs" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"patience": 0},
        {"mode": "down"},
        {"min_delta": -1.0},
        {"stopping_threshold": 2.0, "divergence_threshold": 1.0},
        {"stopping_threshold": 1.0, "divergence_threshold": 2.0, "mode": "max"},
    ],
)
def test_an_argument_outside_its_range_is_an_error_that_names_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        EarlyStop(monitor="val/loss", **wrong)
