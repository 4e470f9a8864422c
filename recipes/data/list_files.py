"""Files below a folder, in an order that depends on their names alone."""

import os
from pathlib import Path


def list_files(
    folder: Path, *, suffixes: frozenset[str], skipped_folders: frozenset[str] = frozenset()
) -> list[Path]:
    """Files with one of the suffixes, sorted by relative path; nothing hidden."""
    found = []
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = [
            name for name in subfolders if name not in skipped_folders and not name.startswith(".")
        ]
        for name in names:
            path = Path(directory, name)
            if path.suffix.lower() in suffixes and not name.startswith("."):
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).parts)
