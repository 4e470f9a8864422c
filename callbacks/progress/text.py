"""Format metrics as one progress line. No Lightning."""

import math
from collections.abc import Mapping
from typing import Any

TRAIN_LOSS = (
    *("train/loss", "train/loss_step", "train_loss", "train_loss_step", "loss", "loss_step"),
    *("training_loss", "training_loss_step", "training/loss", "loss/train"),
)
REWARD = "reward/mean"  # of a policy, whose loss says nothing: it has both signs and lies around 0
VAL_LOSS = (
    *("val/loss", "val_loss", "val/loss_epoch", "val_loss_epoch"),
    *("valid_loss", "valid/loss", "validation_loss", "validation/loss", "loss/val", "loss/valid"),
)


def step_text(step: int, total: int | None) -> str:
    """Return `step 120/600`, padded to constant width; `step    120` if the total is unknown."""
    if total is None:
        return f"step {step:>6}"
    return f"step {step:>{len(str(total))}}/{total}"


def train_text(metrics: Mapping[str, float], *, val_loss: float | None = None) -> str:
    """Return `loss 3.4512  grad 0.81  lr 9.8e-04  12,345 tok/s`, those available; of a policy, not its loss."""
    parts = []
    if REWARD in metrics:
        parts.append(f"reward {metrics[REWARD]:.4f}")
    elif (loss := find_train_loss(metrics)) is not None:
        parts.append(f"loss {loss:.4f}")
    if val_loss is not None:
        parts.append(f"val {val_loss:.4f}")
    if "grad/norm" in metrics:
        norm = metrics["grad/norm"]
        parts.append(f"grad {norm:.2f}" if norm < 1e4 else f"grad {norm:.1e}")
    rate = metrics.get("lr", next((value for name, value in metrics.items() if name.startswith("lr-")), None))
    if rate is not None:
        parts.append(f"lr {rate:.1e}")
    parts.extend(_speed(metrics))
    return "  ".join(parts)


def _speed(metrics: Mapping[str, float]) -> list[str]:
    for name, unit in (("tokens", "tok/s"), ("samples", "samples/s")):
        rate = metrics.get(f"throughput/{name}_per_second")
        if rate is not None:
            return [f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}"]
    return []


def val_text(metrics: Mapping[str, float]) -> str:
    """Return `val loss 3.2100  perplexity 24.7791`: all metrics of a validation by their short names."""
    parts = [f"{name.removeprefix('val/').removeprefix('val_')} {_number(value)}" for name, value in metrics.items()]
    return "val " + "  ".join(parts) if parts else ""


def epoch_text(metrics: Mapping[str, float]) -> str:
    """Return `train_acc 0.9312  train_loss_epoch 0.1234`: all metrics of a training epoch by their full names."""
    return "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def shown_text(shown: Mapping[str, Any], *, beside: Mapping[str, float]) -> str:
    """Return the metrics that a module logs with `prog_bar=True`, except those that `train_text` already shows.

    Args:
        shown: Values by metric name.
        beside: Metrics passed to `train_text` for the same step.
    """
    loss = next((name for name in TRAIN_LOSS if name in beside), "")
    taken = {loss, loss.removesuffix("_step"), "grad/norm", "lr", "v_num"}
    parts = [
        f"{name} {_number(value) if isinstance(value, (int, float)) else value}"
        for name, value in shown.items()
        if name not in taken and not name.startswith("throughput/")
    ]
    return "  ".join(parts)


def position_text(name: str, done: int, total: float) -> str:
    """Return `validation 3/10`; omit the total if it is unknown."""
    return f"{name} {done}" if math.isinf(total) else f"{name} {done}/{int(total)}"


def find_train_loss(metrics: Mapping[str, float]) -> float | None:
    """Return the training loss by any of its usual names; None if it was not logged."""
    return next((metrics[name] for name in TRAIN_LOSS if name in metrics), None)


def find_val_loss(metrics: Mapping[str, float]) -> float | None:
    """Return the validation loss by any of its usual names; None if it was not logged."""
    return next((metrics[name] for name in VAL_LOSS if name in metrics), None)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.5g}"


def clock_text(seconds: float) -> str:
    """Format seconds as `0:32`, `12:05`, `3:04:05` or `2d 03:04`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"
