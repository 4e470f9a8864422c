"""Find a learning rate with a range test under the run's own strategy; creates no run."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from recipes.config.resolved import ResolvedRun
from recipes.config.traits import declare_mode
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.mode.about import describe_command
from recipes.run_folder import claim_output, has_keys, is_page
from recipes.runtime.console import LOGGER
from recipes.runtime.world import global_rank
from recipes.trial.steps import LossRecorder, reject_resume, take_steps

# Learning rate range test (Smith 2015, arXiv 1506.01186): increase the rate until the loss diverges.

# the loss must fall by this fraction of its initial value, or the curve is not informative
_MIN_FALL = 0.02


def rising(step: int, *, num_steps: int, first_fraction: float) -> float:
    """Return a multiplier that grows geometrically from `first_fraction` to 1.

    Args:
        step: Optimizer step, from 0.
        num_steps: Optimizer steps of the test.
        first_fraction: Learning rate of the first step, as a fraction of the last one's.
    """
    return math.pow(first_fraction, 1 - step / (num_steps - 1))


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """Result of a range test.

    Attributes:
        learning_rates: Learning rate of each step.
        losses: Loss of each step.
        smoothed: Smoothed losses.
        steepest: Learning rate where the smoothed loss falls fastest; None if it does not fall.
        lowest: Learning rate where it is lowest; None if it does not fall.
        diverges: Learning rate from which it stays above its initial value; None if not within the test.
    """

    learning_rates: list[float]
    losses: list[float]
    smoothed: list[float]
    steepest: float | None
    lowest: float | None
    diverges: float | None


def read_range_test(learning_rates: Sequence[float], losses: Sequence[float], *, width: int) -> RangeTest:
    """Find the learning rates that matter in the curve of a range test.

    Args:
        learning_rates: Learning rate of each step, ascending.
        losses: Loss of each step; NaN and inf end the curve.
        width: Smoothing steps on either side.
    """
    end = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    smoothed = smooth(losses[:end], width=width)
    found = RangeTest(
        learning_rates=list(learning_rates[: len(losses)]),
        losses=list(losses),
        smoothed=smoothed,
        steepest=None,
        lowest=None,
        diverges=_find_divergence(learning_rates, smoothed, end_is_lost=end < len(losses)),
    )
    if len(smoothed) < 3:
        return found
    bottom = min(range(len(smoothed)), key=smoothed.__getitem__)
    if smoothed[0] - smoothed[bottom] < _MIN_FALL * abs(smoothed[0]):
        return found
    slopes = [smoothed[i + 1] - smoothed[i - 1] for i in range(1, bottom)]
    steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__) if slopes else bottom
    return replace(found, steepest=learning_rates[steepest], lowest=learning_rates[bottom])


def smooth(values: Sequence[float], *, width: int) -> list[float]:
    """Smooth with a triangular window of `width` values on either side, truncated at the ends."""
    weights = {offset: width + 1 - abs(offset) for offset in range(-width, width + 1)}
    smoothed = []
    for i in range(len(values)):
        near = [(weights[j - i], values[j]) for j in range(max(0, i - width), min(len(values), i + width + 1))]
        smoothed.append(sum(w * value for w, value in near) / sum(w for w, _ in near))
    return smoothed


def _find_divergence(learning_rates: Sequence[float], smoothed: Sequence[float], *, end_is_lost: bool) -> float | None:
    """Return the first learning rate after which the loss stays above its start; None if it ends below."""
    if not smoothed:
        return learning_rates[0]
    last_good = max(i for i, loss in enumerate(smoothed) if loss <= smoothed[0])
    if last_good == len(smoothed) - 1:
        return learning_rates[len(smoothed)] if end_is_lost and len(smoothed) < len(learning_rates) else None
    return learning_rates[last_good + 1]


_LOST = 4.0  # times the lowest loss so far


@declare_mode(takes_steps=True, reads_data=True)
def lr_find(
    resolved: ResolvedRun,
    *,
    min_lr: Annotated[float, "> 0"],
    max_lr: Annotated[float, "> 0"],
    num_steps: Annotated[int, ">= 20"],
    path: str | None,
    write_page: Callable[..., None],
) -> int:
    """Increase the learning rate step by step and print where the loss falls fastest.

    Args:
        resolved: The run.
        min_lr: Learning rate of the first step.
        max_lr: Learning rate of the last step, unless the loss diverges before.
        num_steps: Optimizer steps between them.
        path: Folder for `lr_find.json` and `lr_find.html`; None only prints.
        write_page: (file, title, lines, figures) -> writes the page; it is also given `about`, of this command.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: The range is empty, or the run resumes,
            or `path` cannot be written to.
    """
    reject_resume(resolved)
    if min_lr >= max_lr:
        raise ConfigError(
            f"mode.min_lr={min_lr:g} mode.max_lr={max_lr:g}", "the range is empty", "mode.min_lr=1e-6 mode.max_lr=1"
        )
    written = {"lr_find.json": has_keys("steepest", "learning_rates"), "lr_find.html": is_page}
    folder = None if path is None else claim_output(path, "mode.path", replaces=written)
    recorder = LossRecorder(max_ratio=_LOST)
    rising = {
        "_target_": "recipes.mode.lr_find.rising",
        "_partial_": True,
        "num_steps": num_steps,
        "first_fraction": min_lr / max_lr,
    }
    changed = resolved.with_settings({"scheduler": rising, "optimizer.lr": max_lr})
    take_steps(changed, num_steps=num_steps, callbacks=[recorder])
    found = read_range_test(recorder.learning_rates, recorder.losses, width=max(num_steps // 20, 1))
    lines = describe(found, own_lr=resolved.lr)
    for line in lines:
        LOGGER.info(line)
    if folder is not None and global_rank() == 0:
        _write(folder, found, lines, partial(write_page, about=describe_command(resolved)))
    return 0


def describe(found: RangeTest, *, own_lr: float) -> list[str]:
    """Summarize a range test as lines of text.

    Args:
        found: Result of the range test.
        own_lr: Learning rate of the config.
    """
    steps = len(found.losses)
    lines = [
        f"lr_find: {steps} steps from {found.learning_rates[0]:.3g} to {found.learning_rates[-1]:.3g},"
        f" loss {found.losses[0]:.4g} to {found.losses[-1]:.4g}"
    ]
    if found.steepest is None or found.lowest is None:
        lines.append(
            "the loss does not fall within the range: mode.max_lr=<higher>, or mode=preflight if it never does"
        )
        return lines
    lines.append(f"the loss falls fastest at {found.steepest:.2g} and is lowest at {found.lowest:.2g}")
    if found.diverges is None:
        lines.append("it does not diverge within the range: mode.max_lr=<higher> shows where it does")
    else:
        lines.append(f"above {found.diverges:.2g} the loss stays higher than at the start")
    lines.append(f"suggestion: optimizer.lr={found.lowest:.2g} (the config has {own_lr:g}); confirm with a sweep:")
    lines.append(f"  -m optimizer.lr={found.steepest:.2g},{found.lowest:.2g},{2 * found.lowest:.2g}")
    return lines


def _write(folder: Path, found: RangeTest, lines: list[str], write_page: Callable[..., None]) -> None:
    record: dict[str, Any] = {
        "steepest": found.steepest,
        "lowest": found.lowest,
        "diverges": found.diverges,
        "learning_rates": found.learning_rates,
        "losses": [loss if math.isfinite(loss) else None for loss in found.losses],  # JSON has neither NaN nor inf
        "smoothed": found.smoothed,
    }
    write_atomically(folder / "lr_find.json", json.dumps(record, indent=2) + "\n")
    page = folder / "lr_find.html"
    highest = 1.25 * found.losses[0]
    each = {"loss": found.losses, "smoothed": found.smoothed}
    marks = {"falls fastest": found.steepest, "lowest": found.lowest, "diverges": found.diverges}
    figure = {
        "title": "training loss by learning rate",
        "lines": {
            # values far above the start would flatten the rest of the plot
            name: [(lr, loss) for lr, loss in zip(found.learning_rates, values, strict=False) if loss <= highest]
            for name, values in each.items()
        },
        "marks": {name: value for name, value in marks.items() if value is not None},
        "log_x": True,
    }
    write_page(page, "Learning-rate range test", lines, [figure])
    LOGGER.info(str(page))
