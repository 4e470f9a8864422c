"""The words of a job: what makes it what it is, and what to type to have it again."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from recipes.sweep.words import override

# about how the jobs are carried out: the same job by others
_NOT_OF_A_JOB = ("launcher", "hydra", "ignore_slurm")
_NOT_OF_A_JOB_EITHER = tuple(
    f"sweep.{name}"
    for name in (
        "objective",
        "direction",
        "repeat_failed",
        "skip_refused",
        "compare",
        "dashboard",
    )
)


def words_of_job(overrides: Sequence[str]) -> list[str]:
    """What makes a job what it is, whoever carries it out and wherever."""
    # Hydra's grid says what is to be deleted with a value
    plain = [word.removesuffix("=null") if word.startswith("~") else word for word in overrides]
    return [word for word in plain if not _is_of_the_sweep(word)]


def command_of(overrides: Sequence[str]) -> str:
    """The command that trains it again, alone."""
    alone = ["hydra.mode=RUN"] if any(word.startswith("sweep=") for word in overrides) else []
    return f"python train.py {shlex.join([*overrides, *alone])}"


def again(typed: Sequence[str], folder: Path) -> str:
    """The command that goes on with a sweep."""
    kept = [word for word in typed if not word.startswith("hydra.sweep.dir=")]
    return f"python train.py {shlex.join([*kept, override('hydra.sweep.dir', str(folder))])}"


def _is_of_the_sweep(word: str) -> bool:
    key = word.lstrip("+~").partition("=")[0].partition("@")[0]
    room = key.partition(".")[0].partition("/")[0]
    return room in _NOT_OF_A_JOB or key.startswith(_NOT_OF_A_JOB_EITHER)
