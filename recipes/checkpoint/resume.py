"""Find the checkpoint to resume from: the newest valid one of a run folder, or a named one. Imports no torch."""

from pathlib import Path

from recipes.checkpoint.manifest import find_fault, is_of_newer_format, read_manifest
from recipes.checkpoint.retention import BEST, LAST, get_home, resolve_symlink, steps_on_disk
from recipes.errors import ConfigError, type_setting
from recipes.run_folder import CHECKPOINTS


def find_checkpoint(resume: str | None, run_folder: Path, *, setting: str = "resume") -> Path | None:
    """Find the checkpoint that `resume=` selects, by names and sizes; its content is verified on loading.

    Args:
        resume: None, `auto` (this run folder, if it holds a checkpoint), a run folder, or a checkpoint folder.
        run_folder: The folder of this run.
        setting: Key of `resume`, for errors; `start_from` names the checkpoint of another run in the same way.

    Returns:
        A checkpoint, or None to start from the beginning.

    Raises:
        ConfigError: The named folder holds no valid checkpoint, or this run folder only damaged ones; or a later
            version of this project went on with the run.
    """
    if resume is None:
        return None
    folder = run_folder if resume == "auto" else Path(resume)
    if resume != "auto" and not (folder / CHECKPOINTS).is_dir():
        return _find_named(folder, setting)
    found = newest_checkpoint(folder)
    damaged = steps_on_disk(folder / CHECKPOINTS)
    if found is None and (damaged or resume != "auto"):
        reason = "it holds no valid checkpoint"
        if damaged:
            newest = damaged[max(damaged)]
            which = "its only checkpoint is not" if len(damaged) == 1 else f"none of its {len(damaged)} checkpoints is"
            reason = f"{which} valid: {newest.name}: {find_fault(newest)}"
        raise ConfigError(
            f"{setting}={resume}",
            reason,
            "resume=<a run that saved one>, or resume=null hydra.run.dir=<another folder> to start from step 0"
            if setting == "resume"
            else f"{setting}=<a run that saved one>",
        )
    if found is not None and (newer := [path for path in get_passed_over(found) if is_of_newer_format(path)]):
        raise ConfigError(
            f"{setting}={resume}",
            f"{newer[0].name}: {find_fault(newer[0])}",
            f"{type_setting(setting, found)}, to go on from step {read_step(found)}",
        )
    return found


def names_checkpoint(resume: str | None) -> bool:
    """Return whether `resume=` names a specific checkpoint."""
    return resume not in (None, "auto") and not (Path(str(resume)) / CHECKPOINTS).is_dir()


def _find_named(checkpoint: Path, setting: str) -> Path:
    folder = resolve_symlink(checkpoint) or checkpoint  # `last` is a link, or was one
    reason = find_fault(folder)
    if reason is not None:
        raise ConfigError(
            f"{setting}={checkpoint}",
            f"it is not a valid checkpoint: {reason}",
            f"{setting}=<the run's folder>, which loads its newest valid checkpoint",
        )
    return folder.resolve()


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest checkpoint that is valid by names and sizes; None if there is none.

    A run that resumes from an older checkpoint renames the later ones, so the highest step is always the newest.
    """
    folder = run_folder / CHECKPOINTS
    return next((path for path in reversed(_all(folder)) if find_fault(path) is None), None)


def get_passed_over(checkpoint: Path) -> list[Path]:
    """Return the later checkpoints of the same run that are invalid by names and sizes, newest first."""
    step = _get_step(checkpoint)
    later = [path for path in reversed(_all(checkpoint.parent)) if _get_step(path) > step]
    return [path for path in later if find_fault(path) is not None]


def get_fallbacks(checkpoint: Path) -> list[Path]:
    """Return the other checkpoints of the same run: earlier ones, then later ones, each newest first."""
    folder, step = checkpoint.parent, _get_step(checkpoint)
    others = [path for path in reversed(_all(folder)) if path != checkpoint]
    return sorted(others, key=lambda path: _get_step(path) > step)


def read_step(checkpoint: Path) -> int:
    """Return the optimizer step at which a valid checkpoint was written."""
    manifest = read_manifest(checkpoint)
    assert manifest is not None, f"{checkpoint} was valid when it was found"
    return manifest.step


def _all(folder: Path) -> list[Path]:
    """Return the checkpoints in ascending order, each before its copy in place of a link."""
    copies = [folder / name for name in (BEST, LAST) if (folder / name).is_dir() and not (folder / name).is_symlink()]
    # reversed by the callers: of equal steps the checkpoint itself is tried first
    found = sorted([*copies, *steps_on_disk(folder).values()], key=_get_step)
    return [path.resolve() for path in found]


def _get_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint; that of a copy, in its manifest."""
    home = get_home(checkpoint) if checkpoint.name in (LAST, BEST) else checkpoint
    return _step_in_name(home or checkpoint)


def _step_in_name(checkpoint: Path) -> int:
    digits = "".join(letter for letter in checkpoint.name if letter.isdigit())
    return int(digits or 0)
