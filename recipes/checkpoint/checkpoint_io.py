"""Checkpoints as folders, for Lightning: saved by `CheckpointWriter`, verified when loaded, by all ranks together."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO

from recipes.checkpoint.layout import RUN_FILE, is_shard, merge_state, split_state
from recipes.checkpoint.manifest import Manifest, find_content_fault, find_fault, read_manifest
from recipes.checkpoint.resume import older_than
from recipes.checkpoint.retention import remove
from recipes.checkpoint.shard_file import open_tensors
from recipes.checkpoint.writer import CheckpointWriter
from recipes.errors import ConfigError

LOGGER = logging.getLogger("lightning_recipes")


class Rejection(NamedTuple):
    """A checkpoint that was not loaded, and why."""

    path: Path
    why: str


class FolderCheckpointIO(CheckpointIO):
    """What strategies save and load through; called on every rank.

    Args:
        writer: Writes in the background.
        verify_hashes: Whether to hash every file before it is loaded; sizes are always compared.

    Attributes:
        falls_back: Whether a damaged checkpoint is passed over for the newest whole one; False: it is an error.
        loaded: The checkpoint that was loaded.
        refused: Those that were passed over.
        metrics: Numbers of the run that go into the next manifest.
    """

    def __init__(self, *, writer: CheckpointWriter, verify_hashes: bool) -> None:
        self.writer = writer
        self.falls_back = False
        self.loaded: Path | None = None
        self.refused: list[Rejection] = []
        self.metrics: Mapping[str, float] = {}
        self._verify_hashes = verify_hashes

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Begin to save what this rank holds."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        plain, parts = split_state(checkpoint, rank=rank)
        manifest = Manifest(
            step=checkpoint["global_step"],
            world_size=_world_size(),
            strategy=checkpoint["strategy"],
            versions={"torch": torch.__version__, "lightning": lightning.__version__},
            metrics=dict(self.metrics),
            files={},
        )
        self.writer.begin(Path(path), plain, parts, manifest)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Plain data in memory, tensors still on disk.

        Raises:
            ConfigError: The checkpoint is not what was written, and no other may take its place.
        """
        folder = self.whole(Path(path))
        manifest = read_manifest(folder)
        assert manifest is not None, "it has just been verified"
        plain = torch.load(folder / RUN_FILE, map_location="cpu", weights_only=True)
        tensors = open_tensors(folder / name for name in manifest.files if is_shard(name))
        self.loaded = folder
        return merge_state(plain, tensors)

    def whole(self, named: Path) -> Path:
        """A checkpoint that is what was written: the one named or, where allowed, the newest older one.

        Every rank hashes its share of the files, once the ranks have met; before, all of them.
        """
        candidates = [named, *older_than(named)] if self.falls_back else [named]
        for folder in _of_rank_0(candidates):
            why = self._fault(folder)
            if why is None:
                return folder
            self.refused.append(Rejection(folder, why))
            LOGGER.info("Refused %s: %s", folder, why)  # every rank says it; rank 0 is heard
        raise ConfigError(
            f"resume=… {named}",
            f"{self.refused[-1].why}; {'no older one is whole' if self.falls_back else 'it was named'}",
            "resume=<the run's folder>, which takes its newest whole checkpoint"
            if not self.falls_back
            else "resume=null hydra.run.dir=<another folder> to begin anew",
        )

    def _fault(self, folder: Path) -> str | None:
        why = find_fault(folder)
        if why is None and self._verify_hashes:
            manifest = read_manifest(folder)
            if manifest is None:
                why = "its manifest has just gone"
            else:
                ranks, rank = _world_size(), dist.get_rank() if dist.is_initialized() else 0
                # largest first, so that each rank reads about as much
                names = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
                why = find_content_fault(folder, manifest, names[rank::ranks])
        return _first(why)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Nothing half-deleted ever has a checkpoint's name."""
        remove(Path(path))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _of_rank_0(folders: list[Path]) -> list[Path]:
    """As its disk shows them: a shared one may show others something older for a moment."""
    if _world_size() == 1:
        return folders
    told: list[Any] = [folders]
    dist.broadcast_object_list(told)
    first: list[Path] = told[0]
    return first


def _first(why: str | None) -> str | None:
    """The first fault that any rank has found."""
    if _world_size() == 1:
        return why
    found: list[Any] = [None] * _world_size()
    dist.all_gather_object(found, why)
    return next((fault for fault in found if fault is not None), None)
