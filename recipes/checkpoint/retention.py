"""Which checkpoints stay on the disk: the newest, every so many steps, the best. Arithmetic on what the disk holds."""

import math
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipes.checkpoint.manifest import Manifest, find_fault, read_manifest

LAST, BEST = "last", "best"
UNFINISHED = ".tmp"
ROLLED_BACK = "rolled_back_{step:07d}"  # saved after the step that a rollback has gone back to
_TRASH = ".trash"
_NAME = re.compile(r"step_(\d+)\.ckpt")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept.

    Attributes:
        keep_last: So many of the newest.
        keep_every: Those of steps that are multiples of it, for ever; None: none for that reason.
        keep_best: So many of the best.
        metric: What they are best by.
        mode: Whether less or more of it is better.
    """

    keep_last: int
    keep_every: int | None
    keep_best: int
    metric: str
    mode: Literal["min", "max"]

    def kept(self, metrics_by_step: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps to keep, of those on the disk."""
        steps = sorted(metrics_by_step)
        kept = set(steps[-self.keep_last :]) | set(self.best(metrics_by_step))
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        return kept

    def best(self, metrics_by_step: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps with the best metric, best first; of equal ones the earlier."""
        sign = 1 if self.mode == "min" else -1
        measured = [
            (sign * metrics[self.metric], step)
            for step, metrics in metrics_by_step.items()
            if self.metric in metrics and not math.isnan(metrics[self.metric])
        ]
        return [step for _, step in sorted(measured)[: self.keep_best]]


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step_{step:07d}.ckpt"


def steps_on_disk(folder: Path) -> dict[int, Path]:
    """Folders with the name of a checkpoint, by step, whole or not."""
    found = {
        int(match[1]): path
        for path in folder.glob("step_*.ckpt")
        if (match := _NAME.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def manifests(folder: Path) -> dict[int, Manifest]:
    """What the disk holds, by step; folders without a manifest are left alone."""
    read = {step: read_manifest(path) for step, path in steps_on_disk(folder).items()}
    return {step: manifest for step, manifest in read.items() if manifest is not None}


def apply(retention: Retention, folder: Path) -> None:
    """Remove what is not kept, and let `best` name the best one."""
    held = manifests(folder)
    metrics = {step: manifest.metrics for step, manifest in held.items()}
    best = retention.best(metrics)
    if best:
        update_symlink(folder / BEST, name_of(best[0]))
    kept = retention.kept(metrics)
    for step in held:
        if step not in kept:
            remove(folder / name_of(step))


def rename_after(folder: Path, step: int, name: str) -> None:
    """Give the checkpoints after a step another name: the run goes on from that step.

    Args:
        folder: Of checkpoints.
        step: Optimizer steps completed.
        name: With a place for `step`; what has that name already is removed.
    """
    held = steps_on_disk(folder)
    for saved in (one for one in held if one > step):
        target = folder / name.format(step=saved)
        if target.exists():
            shutil.rmtree(target)
        held[saved].rename(target)
    left = [saved for saved in held if saved <= step]
    if left and len(left) < len(held):
        update_symlink(folder / LAST, name_of(max(left)))


def remove(path: Path) -> None:
    """Rename first, so that a half-deleted folder never has a checkpoint's name."""
    shutil.rmtree(set_aside(path))


def set_aside(path: Path) -> Path:
    """Take a checkpoint's name away; the name under which it is to be deleted."""
    doomed = path.with_name(path.name + _TRASH)
    shutil.rmtree(doomed, ignore_errors=True)  # of a killed run
    path.rename(doomed)
    return doomed


def recover_interrupted(folder: Path) -> None:
    """Give a whole checkpoint its name again that a kill has left without: between the old and the new of one step."""
    for path in folder.glob(f"*{_TRASH}"):
        named = path.with_name(path.name.removesuffix(_TRASH))
        if not named.exists() and find_fault(path) is None:
            path.rename(named)


def clean_up(folder: Path) -> None:
    """Remove what a killed run has left half written or half deleted."""
    for pattern in (f"*{UNFINISHED}", f"*{_TRASH}"):
        leftovers: Iterable[Path] = folder.glob(pattern)
        for path in leftovers:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def update_symlink(link: Path, name: str) -> None:
    """Let a link name a checkpoint, by one rename; a small file where the file system has no links."""
    fresh = link.with_name(link.name + UNFINISHED)
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(name)
    except OSError:
        fresh.write_text(name + "\n")
    fresh.replace(link)


def resolve_symlink(link: Path) -> Path | None:
    """The folder that a link names; None where there is no such folder."""
    target = link
    if link.is_file() and _NAME.fullmatch(name := link.read_text(errors="replace").strip()):
        target = link.with_name(name)
    return target.resolve() if target.is_dir() else None
