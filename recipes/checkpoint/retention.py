"""Checkpoint retention: keep the newest, every N steps and the best; naming, links and deletion."""

import itertools
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipes.checkpoint.manifest import Manifest, find_content_fault, find_fault, read_manifest
from recipes.files import write_atomically

LOGGER = logging.getLogger("lightning_recipes")
LAST, BEST = "last", "best"
UNFINISHED = ".tmp"
ROLLED_BACK = "rolled_back_{step:07d}"  # for checkpoints after the step to which the run was rolled back
_TRASH = ".trash"
_LINK_BYTES = 256  # of a small file in place of a link, which holds a checkpoint's name
_NAME = re.compile(r"step_(\d+)\.ckpt")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Retention policy.

    Attributes:
        keep_last: Number of newest checkpoints.
        keep_every: Keep checkpoints whose step is a multiple of this permanently; None disables it.
        keep_best: Number of best checkpoints.
        metric: Metric that ranks checkpoints.
        mode: Whether the lowest or the highest metric is best.
    """

    keep_last: int
    keep_every: int | None
    keep_best: int
    metric: str
    mode: Literal["min", "max"]

    def get_kept(self, metrics_by_step: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Return which of the steps on disk to keep."""
        steps = sorted(metrics_by_step)
        kept = set(steps[-self.keep_last :]) | set(self.get_best(metrics_by_step))
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        return kept

    def is_best(self, metrics: Mapping[str, float], metrics_by_step: Mapping[int, Mapping[str, float]]) -> bool:
        """Return whether a step with these metrics, after those on disk, is one of the best."""
        step = max(metrics_by_step, default=0) + 1
        return step in self.get_best({**metrics_by_step, step: metrics})

    def get_best(self, metrics_by_step: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps with the best metric, best first; ties go to the earlier step."""
        sign = 1 if self.mode == "min" else -1
        measured = [
            (sign * metrics[self.metric], step)
            for step, metrics in metrics_by_step.items()
            if self.metric in metrics and math.isfinite(metrics[self.metric])
        ]
        return [step for _, step in sorted(measured)[: self.keep_best]]


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:07d}.ckpt"


def steps_on_disk(folder: Path) -> dict[int, Path]:
    """Return the folders with checkpoint names, valid or not, by step in ascending order."""
    found = {int(match[1]): path for path in folder.glob("step_*.ckpt") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def get_manifests(folder: Path) -> dict[int, Manifest]:
    """Return the manifests of the checkpoints on disk by step; folders without one are ignored."""
    read = {step: read_manifest(path) for step, path in steps_on_disk(folder).items()}
    return {step: manifest for step, manifest in read.items() if manifest is not None}


def apply(retention: Retention, folder: Path) -> None:
    """Remove the checkpoints not to keep, and point `best` to the best one.

    Folders without a readable manifest stay: this run did not finish them, so it does not delete them.
    """
    manifests = get_manifests(folder)
    metrics = {step: manifest.metrics for step, manifest in manifests.items()}
    best = retention.get_best(metrics)
    if best:
        # before any removal, so that the link never points to a deleted checkpoint
        update_symlink(folder / BEST, checkpoint_name(best[0]))
    kept = retention.get_kept(metrics)
    for step in manifests:
        if step not in kept:
            remove(folder / checkpoint_name(step))


def rename_after(folder: Path, step: int, name: str) -> None:
    """Rename the checkpoints after a step, from which the run continues; `point_links` follows.

    Args:
        folder: Folder of checkpoints.
        step: Optimizer steps completed.
        name: New name with a `{step}` field; an existing folder of that name is removed.
    """
    on_disk = steps_on_disk(folder)
    for later in (saved_step for saved_step in on_disk if saved_step > step):
        target = folder / name.format(step=later)
        if target.exists():
            shutil.rmtree(target)
        on_disk[later].rename(target)


def remove(path: Path) -> None:
    """Rename, then delete a checkpoint, so that a half-deleted folder never has a checkpoint's name."""
    shutil.rmtree(set_aside(path))


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that is to be deleted; return its new path."""
    doomed = path.with_name(path.name + _TRASH)
    shutil.rmtree(doomed, ignore_errors=True)  # left by a killed run
    path.rename(doomed)
    return doomed


def recover_interrupted(folder: Path) -> None:
    """Restore the names of valid checkpoints: of those that a killed run had set aside, and of copies for links.

    A checkpoint is set aside when its step is saved again, until the new one has its name.
    """
    for path in folder.glob(f"*{_TRASH}"):
        original = path.with_name(path.name.removesuffix(_TRASH))
        if not original.exists() and find_fault(path) is None:
            path.rename(original)
    for name in (LAST, BEST):
        adopt_copy(folder / name)


def clean_up(folder: Path) -> None:
    """Remove half-written or half-deleted checkpoints of a killed run."""
    for pattern in (f"*{UNFINISHED}", f"*{_TRASH}"):
        leftovers: Iterable[Path] = folder.glob(pattern)
        for path in leftovers:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def point_links(retention: Retention, folder: Path) -> None:
    """Point `last` to the newest checkpoint and `best` to the best one, if they point elsewhere."""
    metrics = {step: manifest.metrics for step, manifest in get_manifests(folder).items()}
    for link, steps in ((folder / LAST, [max(metrics, default=None)]), (folder / BEST, retention.get_best(metrics))):
        name = checkpoint_name(steps[0]) if steps and steps[0] is not None else None
        if name is not None and not (link.is_symlink() and os.readlink(link) == name):
            update_symlink(link, name)


def update_symlink(link: Path, name: str) -> None:
    """Atomically point a link to a checkpoint; on file systems without links, write a small file instead."""
    adopt_copy(link)
    unfinished = link.with_name(link.name + UNFINISHED)
    unfinished.unlink(missing_ok=True)
    try:
        unfinished.symlink_to(name)
    except OSError:
        write_atomically(link, name + "\n")
    else:
        # replaces the old link atomically: a reader always finds one
        unfinished.replace(link)


def adopt_copy(link: Path) -> None:
    """Restore a link where a tool that knows no links has left a copy: `cp -L`, object storage, zip.

    A copy of a checkpoint that is there is deleted, once every byte of that checkpoint has been read: one flipped bit
    changes no size. If it is the only valid one of its step it gets that checkpoint's name, and what is damaged another
    one: no checkpoint is ever lost.
    """
    if link.is_symlink() or not link.is_dir():
        return
    home = get_home(link)
    is_repeated = home is not None and _find_any_fault(home) is None
    reason = find_fault(link) if is_repeated else _find_any_fault(link)
    if reason is not None or home is None:
        link.rename(_free_name(link.with_name(f"damaged_{link.name}")))
        LOGGER.warning(f"{link} was a folder and not a link, and no valid checkpoint: {reason}; it is renamed")
        return
    copy = link
    if is_repeated:
        copy = set_aside(link)
        LOGGER.info(f"{link} was a copy of {home.name}, as tools that know no links leave it: it is a link again")
    else:
        if home.exists():
            home.rename(_free_name(home.with_name(f"damaged_{home.name}")))
        link.rename(home)
        LOGGER.info(f"{link} was a folder with the only valid checkpoint of its step, which is now {home.name}")
    update_symlink(link, home.name)
    if copy != link:
        shutil.rmtree(copy)


def _find_any_fault(folder: Path) -> str | None:
    """Check a checkpoint by names and sizes, then by content, which reads all of it."""
    reason, manifest = find_fault(folder), read_manifest(folder)
    return reason if reason or manifest is None else find_content_fault(folder, manifest, manifest.files)


def get_home(copy: Path) -> Path | None:
    """Return the path that a checkpoint has by its manifest; None if there is no manifest."""
    manifest = read_manifest(copy)
    return None if manifest is None else copy.with_name(checkpoint_name(manifest.step))


def _free_name(path: Path) -> Path:
    names = itertools.chain([path], (path.with_name(f"{path.name}_{number}") for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def resolve_symlink(link: Path) -> Path | None:
    """Return the folder that `last`, `best` or a checkpoint's name stands for; None if there is no such folder.

    A link may be a small file, may hold a path from before the run was moved, or may have become a copy.
    """
    target = link
    # os.path: unlike Path's methods, false where a folder may not be read
    if os.path.islink(link) and not os.path.exists(link):
        target = link.with_name(Path(os.readlink(link)).name)
    elif link.name in (LAST, BEST):
        if os.path.isfile(link):
            target = link.with_name(_read_name(link) or link.name)
        elif (home := get_home(link)) is not None and find_fault(home) is None:
            target = home
    return target.resolve() if os.path.isdir(target) else None


def _read_name(link: Path) -> str | None:
    """Return the checkpoint's name in a small file that stands for a link; None if it is any other file."""
    try:
        with link.open("rb") as file:
            text = file.read(_LINK_BYTES).decode(errors="replace").strip()
    except OSError:
        return None
    return text if _NAME.fullmatch(text) else None
