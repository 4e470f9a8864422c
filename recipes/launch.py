"""Start one run from its composed config: folder, frozen config, log, build, mode; and how it ends."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from recipes.check import check
from recipes.check.command_line import compose_typed
from recipes.compose import CONF, Composed
from recipes.console import LOGGER, open_console
from recipes.mistake import Mistake

EXIT_FINISHED = 0
EXIT_CRASHED = 1
EXIT_WRONG_CONFIG = 2
EXIT_INTERRUPTED = 130  # what a shell calls Ctrl-C


def compose_and_check(
    overrides: Sequence[str], *, config_folder: Path = CONF, config_name: str = "config"
) -> tuple[Composed | None, list[Mistake]]:
    """Compose a run and gather every mistake in it. No torch, nothing built, no folder made."""
    composed, mistakes = compose_typed(
        overrides, config_folder=config_folder, config_name=config_name
    )
    if composed is not None:
        mistakes = [
            *mistakes,
            *check(composed.config, composed.choices, overrides, composed.run_folder),
        ]
    return composed, mistakes


def report(mistakes: Sequence[Mistake]) -> str:
    """All mistakes, numbered, three lines each."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    lines = [f"The config has {count}; nothing was built."]
    for number, mistake in enumerate(mistakes, start=1):
        lines += [
            "",
            f"{number}. {mistake.you_set}",
            f"   {mistake.why}",
            f"   type: {mistake.remedy}",
        ]
    return "\n".join(lines)


def launch(composed: Composed) -> int:
    """Carry out one checked run in this process.

    Returns:
        The exit code: 0 finished, 2 the config is wrong, 130 interrupted, 1 a crash (its traceback is
        printed and logged).
    """
    fits = composed.config["mode"]["_target_"].endswith(".fit")
    try:
        composed.run_folder.mkdir(parents=True, exist_ok=True)
        open_console(composed.run_folder / "train.log" if fits else None)
    except OSError as error:
        mistake = Mistake(
            f"hydra.run.dir={composed.run_folder}",
            f"the folder cannot be written to: {error.strerror}",
            "hydra.run.dir=<a folder of yours>",
        )
        print(report([mistake]), file=sys.stderr)
        return EXIT_WRONG_CONFIG
    try:
        from recipes.build import carry_out

        return carry_out(composed)
    except KeyboardInterrupt:
        LOGGER.error(f"Interrupted; the run's folder is {composed.run_folder}{_last(composed)}")
        LOGGER.error(f"To go on: python train.py resume={composed.run_folder}")
        return EXIT_INTERRUPTED
    except Exception as error:
        if (wrapped := _mistake_behind(error)) is not None:
            LOGGER.error(report([wrapped]))
            return EXIT_WRONG_CONFIG
        LOGGER.error(traceback.format_exc())
        LOGGER.error(f"The run crashed; its folder is {composed.run_folder}{_last(composed)}")
        return EXIT_CRASHED


def _mistake_behind(error: BaseException | None) -> Mistake | None:
    """The mistake that an error is or wraps: Hydra wraps whatever a constructor raises."""
    while error is not None and not isinstance(error, Mistake):
        error = error.__cause__
    return error


def _last(composed: Composed) -> str:
    from recipes.checkpoint.resume import newest_checkpoint

    checkpoint = newest_checkpoint(composed.run_folder)
    return f", its last whole checkpoint {checkpoint.name}" if checkpoint else ""
