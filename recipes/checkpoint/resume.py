"""Where a run goes on: the newest whole checkpoint of a run folder, or one that is named. Reads names and sizes."""

import re
from pathlib import Path

from recipes.checkpoint.folder_io import is_whole

_STEP = re.compile(r"step_(\d+)\.ckpt")


def find_checkpoint(resume: str | None, run_folder: Path) -> Path | None:
    """Find the checkpoint that `resume=` means.

    Args:
        resume: None, `auto` (this run folder, if it holds one), a run folder, or a checkpoint folder.
        run_folder: The folder of this run.

    Returns:
        A whole checkpoint, or None to start from the beginning.

    Raises:
        ValueError: A folder was named and holds no whole checkpoint.
    """
    if resume is None:
        return None
    if resume == "auto":
        return newest_checkpoint(run_folder)
    named = Path(resume)
    checkpoint = named if _STEP.fullmatch(named.name) else newest_checkpoint(named)
    if checkpoint is None or not is_whole(checkpoint):
        raise ValueError(
            f"resume={resume}: there is no whole checkpoint in it; type resume=<run folder>"
            " of a run that saved one, or leave resume= out to start anew"
        )
    return checkpoint


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The whole checkpoint with the largest step, whatever `last` says."""
    found = [
        (int(match[1]), folder)
        for folder in (run_folder / "checkpoints").glob("step_*.ckpt")
        if (match := _STEP.fullmatch(folder.name)) and is_whole(folder)
    ]
    return max(found)[1] if found else None
