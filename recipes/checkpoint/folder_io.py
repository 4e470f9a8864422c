"""A checkpoint is a folder, written beside its place and renamed when whole. One write of the state's size."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"


class FolderCheckpointIO(CheckpointIO):
    """Writes `state.pt` and, last, `manifest.json` with its size; reads only folders that have both."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        folder = Path(path)
        unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a killed run: in a container, ids repeat
        unfinished.mkdir(parents=True)
        torch.save(checkpoint, unfinished / STATE_FILE)
        _sync(unfinished / STATE_FILE)
        manifest = {
            "step": checkpoint["global_step"],
            "files": {STATE_FILE: {"bytes": (unfinished / STATE_FILE).stat().st_size}},
        }
        (unfinished / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")
        _sync(unfinished / MANIFEST_FILE)
        if folder.exists():
            self.remove_checkpoint(folder)
        unfinished.rename(folder)
        _sync(folder.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = Path(path)
        if not is_whole(folder):
            raise ValueError(
                f"{folder} is no whole checkpoint: {MANIFEST_FILE} is missing or {STATE_FILE} has another size"
            )
        state: dict[str, Any] = torch.load(
            folder / STATE_FILE,
            map_location=map_location or "cpu",
            weights_only=True,
            mmap=True,  # each rank reads what it keeps, not a copy of the whole
        )
        return state

    def remove_checkpoint(self, path: str | Path) -> None:
        """Rename first, so that a half-deleted folder never has a checkpoint's name."""
        folder = Path(path)
        doomed = folder.with_name(f"{folder.name}.trash-{os.getpid()}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a manifest and every file it names in its full size."""
    manifest = read_manifest(folder)
    return manifest is not None and all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry["bytes"]
        for name, entry in manifest["files"].items()
    )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint folder; None where there is none that can be read."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST_FILE).read_text())
    except (OSError, ValueError):
        return None
    return manifest if {"step", "files"} <= manifest.keys() else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
