"""Find a learning rate with a range test under the run's own strategy; creates no run."""

import json
import math
from collections.abc import Callable
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
from recipes.trial.lr_range import RangeTest, read_range_test
from recipes.trial.steps import LossRecorder, reject_resume, take_steps

_LOST = 4.0  # times the lowest loss so far


@declare_mode(takes_steps=True)
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
        "_target_": "recipes.trial.lr_range.rising",
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
