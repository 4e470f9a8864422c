"""Text of a progress line: metrics in, one line out. No Lightning."""

from collections.abc import Mapping

TRAIN_LOSS = ("train/loss", "train/loss_step", "train_loss", "train_loss_step", "loss")
VAL_LOSS = ("val/loss", "val_loss", "val/loss_epoch", "val_loss_epoch")


def find_first(metrics: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    """Return the value of the first of `names` that was logged; None if none was."""
    return next((metrics[name] for name in names if name in metrics), None)


def step_text(step: int, total: int | None) -> str:
    """Return `step 120/600`, equally wide all through a run; `step    120` for a run without an end."""
    if total is None:
        return f"step {step:>6}"
    return f"step {step:>{len(str(total))}}/{total}"


def train_text(metrics: Mapping[str, float], *, val_loss: float | None = None) -> str:
    """Return `loss 3.4512  grad 0.81  lr 9.8e-04  12,345 tok/s`: the available metrics, in this order."""
    parts = []
    loss = find_first(metrics, TRAIN_LOSS)
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if val_loss is not None:
        parts.append(f"val {val_loss:.4f}")
    if "grad/norm" in metrics:
        norm = metrics["grad/norm"]
        parts.append(f"grad {norm:.2f}" if norm < 1e4 else f"grad {norm:.1e}")
    if "lr" in metrics:
        parts.append(f"lr {metrics['lr']:.1e}")
    parts.extend(_speed(metrics))
    return "  ".join(parts)


def _speed(metrics: Mapping[str, float]) -> list[str]:
    for name, unit in (("tokens", "tok/s"), ("samples", "samples/s")):
        rate = metrics.get(f"throughput/{name}_per_second")
        if rate is not None:
            return [f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}"]
    return []


def val_text(metrics: Mapping[str, float]) -> str:
    """Return `val loss 3.2100  perplexity 24.7791`: every validation metric, by its short name."""
    parts = []
    for name, value in metrics.items():
        for prefix in ("val/", "val_"):
            if name.startswith(prefix):
                short = name.removeprefix(prefix)
                parts.append(f"{short} {value:.4f}" if value < 10 else f"{short} {value:.5g}")
    return "val " + "  ".join(parts) if parts else ""


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
