"""Where a run goes on: the newest whole checkpoint of a run folder, or one that is named. Names and sizes, no torch."""

from pathlib import Path

from recipes.checkpoint.manifest import find_fault, read_manifest
from recipes.checkpoint.retention import resolve_symlink, steps_on_disk
from recipes.errors import ConfigError
from recipes.run_folder import CHECKPOINTS


def find_checkpoint(resume: str | None, run_folder: Path) -> Path | None:
    """Find the checkpoint that `resume=` means. Its content is proven when it is loaded.

    Args:
        resume: None, `auto` (this run folder, if it holds one), a run folder, or a checkpoint folder.
        run_folder: The folder of this run.

    Returns:
        A checkpoint that is whole by names and sizes, or None to start from the beginning.

    Raises:
        ConfigError: A folder was named and holds no whole checkpoint; or this one holds only damaged ones.
    """
    if resume is None:
        return None
    folder = run_folder if resume == "auto" else Path(resume)
    if resume != "auto" and not (folder / CHECKPOINTS).is_dir():
        return _named(folder)
    found = newest_checkpoint(folder)
    damaged = steps_on_disk(folder / CHECKPOINTS)
    if found is None and (damaged or resume != "auto"):
        why = "there is no whole checkpoint in it"
        if damaged:
            newest = damaged[max(damaged)]
            why = f"none of its {len(damaged)} checkpoints is whole: {newest.name}: {find_fault(newest)}"
        raise ConfigError(
            f"resume={resume}",
            why,
            "resume=<a run that saved one>, or resume=null hydra.run.dir=<another folder> to begin anew",
        )
    return found


def names_checkpoint(resume: str | None) -> bool:
    """Whether `resume=` means one checkpoint and no other."""
    return resume not in (None, "auto") and not (Path(str(resume)) / CHECKPOINTS).is_dir()


def _named(checkpoint: Path) -> Path:
    folder = resolve_symlink(checkpoint) or checkpoint  # `last` is a link
    why = find_fault(folder)
    if why is not None:
        raise ConfigError(
            f"resume={checkpoint}",
            f"it is no whole checkpoint: {why}",
            "resume=<the run's folder>, which takes its newest whole checkpoint",
        )
    return folder.resolve()


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The newest whole checkpoint. A run that resumes from an older one gives those after it other names."""
    folder = run_folder / CHECKPOINTS
    return next((path for path in reversed(_all(folder)) if find_fault(path) is None), None)


def older_than(checkpoint: Path) -> list[Path]:
    """The other checkpoints of its run, newest first: those before it, then those after it."""
    folder, step = checkpoint.parent, _step_in_name(checkpoint)
    others = [path for path in reversed(_all(folder)) if path != checkpoint]
    return sorted(others, key=lambda path: _step_in_name(path) > step)


def step_of(checkpoint: Path) -> int:
    """The optimizer step at which a whole checkpoint was written."""
    manifest = read_manifest(checkpoint)
    assert manifest is not None, f"{checkpoint} was whole when it was found"
    return manifest.step


def _all(folder: Path) -> list[Path]:
    return [path.resolve() for path in steps_on_disk(folder).values()]


def _step_in_name(checkpoint: Path) -> int:
    digits = "".join(letter for letter in checkpoint.name if letter.isdigit())
    return int(digits or 0)
