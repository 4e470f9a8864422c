"""Lightning's CheckpointIO for checkpoint folders: `CheckpointWriter` saves them, all ranks verify and load them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO
from typing_extensions import override

from recipes.checkpoint.layout import RUN_FILE, is_shard, merge_state, split_state
from recipes.checkpoint.manifest import Manifest, find_content_fault, find_fault, read_manifest
from recipes.checkpoint.resume import get_fallbacks, get_passed_over
from recipes.checkpoint.retention import remove
from recipes.checkpoint.saved_tensor import open_tensors
from recipes.checkpoint.writer import CheckpointWriter
from recipes.errors import ConfigError
from recipes.foreign_file import FormatError, reading
from recipes.numerics.collectives import gather_objects

LOGGER = logging.getLogger("lightning_recipes")
# every byte is as the manifest says, and yet it is not what this version writes
FIX_OF_A_FORGERY = "resume=<another checkpoint, or another run>: no run of this version writes such a file"


class Rejection(NamedTuple):
    """A checkpoint that was not loaded, and why."""

    path: Path
    why: str


class FolderCheckpointIO(CheckpointIO):
    """Saves and loads checkpoints for strategies; called on every rank.

    Args:
        writer: Background writer.
        verify_hashes: Whether to hash every file before it is loaded; sizes are always compared.
        setting: Key of what names the checkpoints that it reads, for errors.

    Attributes:
        falls_back: Whether to skip a damaged checkpoint for the newest valid one; False makes it an error.
        loaded: The checkpoint that was loaded; None before.
        rejected: Checkpoints that were skipped.
        metrics: Metrics of the run for the next manifest.
        ended: Why the run ends with the next checkpoint; None if it goes on.
    """

    def __init__(self, *, writer: CheckpointWriter, verify_hashes: bool, setting: str = "resume") -> None:
        self.writer = writer
        self._setting = setting
        self.falls_back = False
        self.loaded: Path | None = None
        self.rejected: list[Rejection] = []
        self.metrics: Mapping[str, float] = {}
        self.ended: Mapping[str, Any] | None = None
        self._verify_hashes = verify_hashes

    def for_source(self, *, falls_back: bool) -> "FolderCheckpointIO":
        """Return a reader of the checkpoints of a run to start from, with the same verification."""
        reader = FolderCheckpointIO(writer=self.writer, verify_hashes=self._verify_hashes, setting="start_from")
        reader.falls_back = falls_back
        return reader

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Start saving this rank's shards."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        plain, of_rank, parts = split_state(checkpoint, rank=rank)
        manifest = Manifest(
            step=checkpoint["global_step"],
            world_size=_world_size(),
            strategy=checkpoint["strategy"],
            versions={"torch": torch.__version__, "lightning": lightning.__version__},
            metrics=dict(self.metrics),
            files={},
            ended=self.ended,
        )
        self.writer.begin(Path(path), plain, parts, manifest, of_rank=of_rank)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return plain data in memory and tensors still on disk.

        Raises:
            ConfigError: The checkpoint is damaged, and there is no other to fall back to.
        """
        folder = self.find_valid(Path(path))
        manifest = read_manifest(folder)
        assert manifest is not None, "it has just been verified"
        setting = f"{self._setting}={folder}"
        with reading(folder / RUN_FILE, setting, FIX_OF_A_FORGERY):
            if RUN_FILE not in manifest.files:
                raise FormatError("its manifest does not list it")
            plain = torch.load(folder / RUN_FILE, map_location="cpu", weights_only=True)
            if plain["global_step"] != manifest.step:
                raise FormatError(f"its step is {plain['global_step']!r}, and that of its manifest {manifest.step}")
        with reading(folder, setting, FIX_OF_A_FORGERY):
            tensors = open_tensors(folder / name for name in manifest.files if is_shard(name))
            merged = merge_state(plain, tensors)
        self.loaded = folder
        return merged

    def find_valid(self, named: Path) -> Path:
        """Return the named checkpoint if it is valid, else, where allowed, the newest valid one.

        Each rank hashes its fraction of the files once the process group exists; before that, all of them.

        Raises:
            ConfigError: No checkpoint is valid.
        """
        passed_over = get_passed_over(named) if self.falls_back else []
        others = [path for path in get_fallbacks(named) if path not in passed_over] if self.falls_back else []
        # from rank 0: a shared file system may briefly show other ranks an older state
        folders: list[Path] = gather_objects([*passed_over, named, *others])[0]
        for folder in folders:
            reason = self._find_fault(folder)
            if reason is None:
                return folder
            rejection = Rejection(folder, reason)
            if rejection not in self.rejected:  # looked for before
                self.rejected.append(rejection)
                LOGGER.info("Rejected %s: %s", folder, reason)  # only rank 0's lines reach the console
        raise ConfigError(
            f"{self._setting}={named}",
            f"{self.rejected[-1].why}; {'no other one is valid' if self.falls_back else 'it was named'}",
            f"{self._setting}=<the run's folder>, which loads its newest valid checkpoint"
            if not self.falls_back
            else "resume=null hydra.run.dir=<another folder> to start from step 0"
            if self._setting == "resume"
            else f"{self._setting}=<a run with a valid checkpoint>",
        )

    def _find_fault(self, folder: Path) -> str | None:
        reason = find_fault(folder)
        if reason is None and self._verify_hashes:
            manifest = read_manifest(folder)
            if manifest is None:
                reason = "its manifest has just disappeared"
            else:
                ranks, rank = _world_size(), dist.get_rank() if dist.is_initialized() else 0
                # largest first, so that each rank reads about as much
                names = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
                reason = find_content_fault(folder, manifest, names[rank::ranks])
        # gathered on every rank, even if one found no fault: all must load the same checkpoint
        return next((found for found in gather_objects(reason) if found is not None), None)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint; a half-deleted folder never has a checkpoint's name."""
        remove(Path(path))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
