"""Schedules are functions of the step: their values at the steps that matter; those of torch have torch's rates."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TINY, CrashAt, composed_config, read_metrics, resolved
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from recipes import scheduler
from recipes.build import build
from recipes.config import compose_and_check
from recipes.errors import ConfigError
from recipes.mode.fit import fit
from recipes.scheduler import Plateau, TorchSchedule

SCHEDULES: dict[str, Callable[[int], float]] = {
    "warmup_cosine": partial(scheduler.warmup_cosine, num_steps=100, warmup_steps=10, min_lr_factor=0.1),
    "wsd": partial(
        scheduler.wsd,
        num_steps=100,
        warmup_steps=10,
        decay_steps=20,
        min_lr_factor=0.0,
    ),
    "linear": partial(scheduler.linear, num_steps=100, warmup_steps=10, min_lr_factor=0.0),
    "constant": partial(scheduler.constant, warmup_steps=10),
    "constant_cooldown": partial(
        scheduler.constant_cooldown,
        num_steps=100,
        warmup_steps=0,
        cooldown_steps=25,
        min_lr_factor=0.0,
    ),
    "step": partial(scheduler.step, milestones=[50, 80], gamma=0.1, warmup_steps=0),
    "one_cycle": partial(
        scheduler.one_cycle,
        num_steps=100,
        pct_start=0.3,
        start_fraction=0.04,
        min_lr_factor=1e-4,
    ),
}
VALUES: dict[str, dict[int, float]] = {
    "warmup_cosine": {0: 0.1, 9: 1.0, 54: 0.55, 99: 0.1, 150: 0.1},
    "wsd": {0: 0.1, 9: 1.0, 79: 1.0, 80: 0.95, 89: 0.5, 99: 0.0},
    "linear": {0: 0.1, 9: 1.0, 54: 0.5, 99: 0.0, 200: 0.0},
    "constant": {0: 0.1, 4: 0.5, 9: 1.0, 10_000: 1.0},
    "constant_cooldown": {0: 1.0, 74: 1.0, 75: 0.8, 83: 0.4, 99: 0.0},
    "step": {0: 1.0, 49: 1.0, 50: 0.1, 79: 0.1, 80: 0.01},
    "one_cycle": {14: 0.52, 29: 1.0, 64: 0.50005, 99: 1e-4},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_its_values_at_the_steps_that_matter(name: str) -> None:
    for step, expected in VALUES[name].items():
        assert SCHEDULES[name](step) == pytest.approx(expected, abs=1e-12), step


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_multiplier_is_always_between_zero_and_one(name: str) -> None:
    assert all(0.0 <= SCHEDULES[name](step) <= 1.0 for step in range(300))


@pytest.mark.parametrize("name", ["warmup_cosine", "linear"])
def test_a_run_that_ends_within_its_warmup_only_warms_up(name: str) -> None:
    short = partial(SCHEDULES[name], num_steps=3)
    assert [short(step) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def _optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr)


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "make",
    [
        partial(StepLR, step_size=7, gamma=0.5),
        partial(CosineAnnealingWarmRestarts, T_0=10, T_mult=2, eta_min=1e-5),
        partial(OneCycleLR, max_lr=2e-3, total_steps=50, cycle_momentum=False),
    ],
    ids=["StepLR", "CosineAnnealingWarmRestarts", "OneCycleLR"],
)
@pytest.mark.parametrize("warmup_steps", [0, 5])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_of_torch_has_its_rates_after_the_warmup_asked_in_any_order(
    make: Callable[..., LRScheduler], warmup_steps: int
) -> None:
    optimizer = _optimizer(1e-3)
    theirs = make(optimizer)
    rates = []
    for _ in range(50):
        rates.append(_rate(optimizer))
        theirs.step()
    schedule = TorchSchedule(torch=make, lr=1e-3, num_steps=50 + warmup_steps, warmup_steps=warmup_steps)
    for step in reversed(range(50)):
        # divided by the peak here, and multiplied by it in the optimizer
        assert schedule(step + warmup_steps) * 1e-3 == pytest.approx(rates[step], rel=1e-15)
    assert [schedule(step) for step in range(warmup_steps)] == [(step + 1) / 5 for step in range(warmup_steps)]


PLATEAU: dict[str, Any] = {
    "monitor": "val/loss",
    "mode": "min",
    "factor": 0.5,
    "patience": 1,
    "threshold": 1e-2,
    "threshold_mode": "rel",
    "cooldown": 1,
    "min_lr": 1e-4,
    "lr": 1e-3,
    "warmup_steps": 0,
}
FOUND = [3.0, 2.5, 2.6, 2.51, 2.5, 2.49, 2.0, float("nan"), 2.3, 2.2, 2.1, 2.0, 1.999, 2.4, 2.4, 2.4, 1.0]


def test_a_plateau_has_the_rates_of_torch_and_goes_back_to_those_of_any_step() -> None:
    optimizer = _optimizer(1e-3)
    settings = {key: value for key, value in PLATEAU.items() if key not in ("monitor", "lr", "warmup_steps")}
    theirs, ours = ReduceLROnPlateau(optimizer, **settings), Plateau(**PLATEAU)
    rates = []
    for number, value in enumerate(FOUND, start=1):
        theirs.step(value)
        before = ours(0)
        assert ours.add(10 * number, value) == (ours(0) != before)
        rates.append(_rate(optimizer))
        assert ours(10 * number) * 1e-3 == pytest.approx(rates[-1], rel=1e-15)
    assert len(set(rates)) == 5, "reduced four times, the last time to min_lr"
    again = Plateau(**PLATEAU)
    again.load_state_dict(ours.state_dict())
    assert again(0) == ours(0)
    for number in reversed(range(1, len(FOUND) + 1)):
        ours.rewind(10 * number + 9)
        assert ours(0) * 1e-3 == pytest.approx(rates[number - 1], rel=1e-15)


@pytest.mark.parametrize(
    ("overrides", "said", "fix"),
    [
        (
            "scheduler._target_=torch.optim.lr_scheduler.StepLR",
            "a scheduler of an optimizer has an option around it",
            "scheduler=torch 'scheduler.torch={_target_: torch.optim.lr_scheduler.StepLR, <argument>: <value>}'",
        ),
        (
            "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",
            "a scheduler of an optimizer has an option around it",
            "scheduler=plateau scheduler.patience=10",
        ),
        (
            "scheduler=torch",
            "it has no default",
            "'scheduler.torch={_target_: torch.optim.lr_scheduler.StepLR, step_size: 100}'",
        ),
        (
            "scheduler=torch scheduler.torch={_target_:torch.optim.lr_scheduler.OneCycleLR,max_lr:1,total_steps:9}",
            "only the learning rate follows a schedule",
            "+scheduler.torch.cycle_momentum=false",
        ),
        (
            "scheduler=torch scheduler.torch={_target_:torch.optim.lr_scheduler.SequentialLR,"
            "schedulers:[{_target_:a.B}],milestones:[2]}",
            "these need the optimizer, which only code can give them",
            "scheduler.warmup_steps=<steps> with the scheduler after the warm-up, or"
            " 'scheduler.torch={_target_: <module.function>}', a function of yours that takes the optimizer",
        ),
        (
            "scheduler=torch scheduler.torch={_target_:torch.optim.AdamW}",
            "a run calls it with an optimizer, and AdamW takes no 'optimizer'",
            "'scheduler.torch={_target_: torch.optim.lr_scheduler.StepLR, step_size: 100}'",
        ),
        (
            "scheduler=plateau scheduler.monitor=val/los",
            "validation computes val/loss val/perplexity val/token_accuracy",
            "scheduler.monitor=val/loss, or +metrics.…",
        ),
    ],
)
def test_what_cannot_be_a_schedule_is_answered_with_what_can(overrides: str, said: str, fix: str) -> None:
    _, mistakes = compose_and_check(overrides.split())
    assert [(mistake.reason, mistake.fix) for mistake in mistakes] == [(said, fix)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(ReduceLROnPlateau, patience=2), "it follows a metric of validation, and this schedule the steps"),
        (partial(OneCycleLR, max_lr=1.0, total_steps=4, cycle_momentum=False), "The specified number of total steps"),
        (partial(StepLR, step_size=0), "modulo by zero"),
        (lambda optimizer: optimizer, "is no scheduler of torch, which has a rate per step"),
    ],
)
def test_a_scheduler_without_a_rate_for_every_step_is_refused_before_the_first(
    make: Callable[..., Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        TorchSchedule(torch=make, lr=1e-3, num_steps=9, warmup_steps=0)


def _train(folder: Path, text_folder: str, *overrides: str, stop_at: int | None = None) -> list[dict[str, float]]:
    """Train with a rate that nearly every validation reduces; return the rows."""
    config = composed_config(
        *(override for override in TINY if not override.startswith("~")),
        *("scheduler=plateau", "scheduler.patience=0", "scheduler.threshold=0.05", "scheduler.factor=0.5"),
        *(
            "optimizer.lr=1e-3",
            "warmup_steps=3",
            "log_every=1",
            "eval_every=4",
            "save_every=1",
            "callbacks=[grad_norm]",
        ),
        f"data.path={text_folder}",
        *overrides,
        "resume=auto",
        f"hydra.run.dir={folder}",
    )
    folder.mkdir(exist_ok=True)
    run = build(resolved(config, folder))
    if stop_at is not None:
        run.trainer.callbacks.insert(0, CrashAt(step=stop_at))  # type: ignore[attr-defined]
    fit(run)
    return read_metrics(folder)


def test_a_run_with_a_plateau_continues_with_the_same_rates_from_every_step(tmp_path: Path, text_folder: str) -> None:
    whole = _train(tmp_path / "whole", text_folder, "trainer.max_steps=18")
    rates = [row["lr"] for row in whole]
    assert rates[2] == 1e-3
    assert len(set(rates[3:])) >= 3, rates
    for stop_at in (3, 4, 5, 8, 11):
        folder = tmp_path / str(stop_at)
        with pytest.raises(OSError, match="crash"):
            _train(folder, text_folder, "trainer.max_steps=18", stop_at=stop_at)
        rows = _train(folder, text_folder, "trainer.max_steps=18")
        assert [(row["step"], row["lr"], row["train/loss"]) for row in rows] == [
            (row["step"], row["lr"], row["train/loss"]) for row in whole
        ], stop_at


def test_a_validation_only_because_the_run_ends_is_not_one_of_the_longer_run(tmp_path: Path, text_folder: str) -> None:
    whole = _train(tmp_path / "whole", text_folder, "trainer.max_steps=14")
    folder = tmp_path / "extended"
    _train(folder, text_folder, "trainer.max_steps=6")
    rows = _train(folder, text_folder, "trainer.max_steps=14")
    assert [row["lr"] for row in rows] == [row["lr"] for row in whole]
