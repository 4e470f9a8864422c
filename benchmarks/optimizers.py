"""The default recipe with each optimizer at its own learning rate: loss after equal steps, time per step."""

import statistics
import sys
import time
from typing import Any

import torch
from measure import build_run, in_turn, report, wait_for_device
from step_overhead import plain_loop

NUM_STEPS = 100  # the recipe has 700; the learning-rate schedule is compressed
TIMED_ROUNDS = 20
# option -> learning rate for two million parameters
OPTIONS = {"adamw": 3e-3, "adamw_8bit": 3e-3, "schedule_free": 6e-3, "lion": 6e-4, "adafactor": 1e-1, "muon": 3e-3}


def overrides(option: str) -> list[str]:
    """Return the recipe's overrides for one optimizer, without features that cost time but change nothing."""
    return [
        f"optimizer={option}",
        f"optimizer.lr={OPTIONS[option]}",
        f"trainer.max_steps={NUM_STEPS}",
        f"warmup_steps={NUM_STEPS // 10}",
        f"eval_every={NUM_STEPS}",
        "save_every=null",
        "eval_samples=256",
        "callbacks=[grad_norm]",
    ]


def train(option: str) -> dict[str, Any]:
    """Train the recipe; return an optimizer's result row, without times."""
    print(option, file=sys.stderr)
    run = build_run(overrides(option))
    run.trainer.fit(run.task, datamodule=run.data)
    optimizer = run.trainer.optimizers[0]
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    num_bytes = sum(value.numel() * value.element_size() for value in kept)
    num_parameters = sum(parameter.numel() for parameter in run.task.parameters())
    return {
        "optimizer": option,
        "learning rate": f"{optimizer.param_groups[0]['initial_lr']:g}",
        "val/loss": f"{float(run.trainer.callback_metrics['val/loss']):.3f}",
        "state, bytes per parameter": f"{num_bytes / num_parameters:.2f}",
    }


def time_steps() -> dict[str, float]:
    """Return the median seconds per step of each optimizer, measured in turns."""
    loops = {option: plain_loop(overrides(option)) for option in OPTIONS}
    seconds: dict[str, list[float]] = {option: [] for option in OPTIONS}
    for number in in_turn(TIMED_ROUNDS):
        for option, step in loops.items():
            wait_for_device()
            began = time.perf_counter()
            step()
            wait_for_device()
            if number:
                seconds[option].append(time.perf_counter() - began)
    return {option: statistics.median(found) for option, found in seconds.items()}


def main() -> None:
    medians = time_steps()
    rows = [train(option) for option in OPTIONS]
    for option, row in zip(OPTIONS, rows, strict=True):
        row["step, relative to AdamW"] = f"{medians[option] / medians['adamw']:.3f}"
    report("optimizers", rows)


if __name__ == "__main__":
    main()
