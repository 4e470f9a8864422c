"""Where a run goes on: the newest whole checkpoint of a run folder, or one that is named. Reads names and sizes."""

import re
from pathlib import Path

from recipes.checkpoint.folder_io import is_whole, read_manifest
from recipes.mistake import Mistake

_STEP = re.compile(r"step_(\d+)\.ckpt")


def find_checkpoint(resume: str | None, run_folder: Path) -> Path | None:
    """Find the checkpoint that `resume=` means.

    Args:
        resume: None, `auto` (this run folder, if it holds one), a run folder, or a checkpoint folder.
        run_folder: The folder of this run.

    Returns:
        A whole checkpoint, or None to start from the beginning.

    Raises:
        Mistake: A folder was named and holds no whole checkpoint.
    """
    if resume is None:
        return None
    if resume == "auto":
        return newest_checkpoint(run_folder)
    named = Path(resume)
    if is_whole(named):
        return named.resolve()  # `last` is a link
    checkpoint = newest_checkpoint(named)
    if checkpoint is None:
        raise Mistake(
            f"resume={resume}",
            "there is no whole checkpoint in it",
            "resume=<a run that saved one>",
        )
    return checkpoint


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The checkpoint that `last` names or, where that is not whole, the whole one with the largest step.

    `last` comes first: a run resumed from an older checkpoint has abandoned the later ones.
    """
    folder = run_folder / "checkpoints"
    if is_whole(folder / "last"):
        return (folder / "last").resolve()
    found = [
        (int(match[1]), path)
        for path in folder.glob("step_*.ckpt")
        if (match := _STEP.fullmatch(path.name)) and is_whole(path)
    ]
    return max(found)[1] if found else None


def step_of(checkpoint: Path) -> int:
    """The optimizer step at which a whole checkpoint was written."""
    manifest = read_manifest(checkpoint)
    assert manifest is not None, f"{checkpoint} was whole when it was found"
    step: int = manifest["step"]
    return step
