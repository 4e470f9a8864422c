"""Cost of monitoring per step: throughput, memory, diagnosis, metric rows and every logger, timed hook by hook."""

import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

from lightning.pytorch.callbacks import Callback
from measure import build_run, report

STEPS = 1000
LOG_EVERY = 10
OVERRIDES = (
    "model.num_layers=1",
    "model.num_heads=2",
    "model.hidden_size=32",
    "seq_len=32",
    "global_batch_size=4",
    f"trainer.max_steps={STEPS}",
    f"log_every={LOG_EVERY}",
    f"eval_every={STEPS}",
    "save_every=null",
    "eval_samples=1",
    "~callbacks.sample_text",
    "~callbacks.report",
)
SKIP = 50  # the first steps open files and count FLOPs
WATCHING = ("SpeedMonitor", "BottleneckMonitor", "MemoryMonitor", "StepProfiler", "RowWriter")
LOGGERS = {
    "csv": "logger=csv",
    "csv and wandb, offline": "logger=wandb",
    "csv and tensorboard": "logger=tensorboard",
}
HOOKS = [name for name in dir(Callback) if name.startswith("on_") and "train_batch" in name] + [
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
]


class Timer:
    """Accumulates the seconds spent in wrapped calls by name, while it is on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.is_on = False

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if self.is_on:
                    self.seconds[name] += time.perf_counter() - began

        return call


class TurnOn(Callback):
    """Starts the timer after the first steps."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.timer.is_on = trainer.global_step >= SKIP


def hook_milliseconds(overrides: list[str]) -> dict[str, float]:
    """Return the milliseconds per step in each monitoring class; rows include the work of every logger."""
    run, timer = build_run([*OVERRIDES, *overrides]), Timer()
    for callback in run.trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if name not in WATCHING or name == "RowWriter":  # its hook also calls callbacks that act after the row
            continue
        for hook in HOOKS:
            if getattr(type(callback), hook) is not getattr(Callback, hook):
                setattr(callback, hook, timer.around(name, getattr(callback, hook)))
    for logger in run.trainer.loggers:
        logger.log_metrics = timer.around("RowWriter", logger.log_metrics)  # type: ignore[method-assign]
    run.trainer.callbacks.insert(0, TurnOn(timer))  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    for logger in run.trainer.loggers:
        logger.finalize("success")
    return {name: 1000 * seconds / (STEPS - SKIP) for name, seconds in timer.seconds.items()}


def main() -> None:
    os.environ["WANDB_MODE"] = "offline"
    rows = []
    for name, override in LOGGERS.items():
        found = hook_milliseconds([override])
        row: dict[str, Any] = {"loggers": name}
        row |= {f"{observer}, ms": f"{found[observer]:.3f}" for observer in WATCHING}
        rows.append(row | {"all, ms a step": f"{sum(found.values()):.3f}"})
    report("watching", rows)


if __name__ == "__main__":
    main()
