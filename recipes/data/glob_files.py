"""Glob with `**` that yields each file once and does not follow symlinks to folders."""

import glob
import re
from collections.abc import Iterator
from pathlib import Path


def expand_glob(pattern: str) -> Iterator[Path]:
    """Yield matching paths, hidden ones only where the pattern has a leading dot.

    `glob.glob` follows symlinks to folders under `**`: one link to a parent folder yields every file forty times, and
    two never finish.

    Args:
        pattern: `*`, `?`, `[a-c]`, and `**` for any number of folders; an absolute or a relative path.
    """
    parts = Path(pattern).parts
    first = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = Path(*parts[:first])
    # `**` within a name is `*`; at the end it also matches files
    rest = [part if part == "**" else re.sub(r"\*{2,}", "*", part) for part in parts[first:]]
    rest += ["*"] if rest[-1:] == ["**"] else []
    if not rest:
        yield from [root] if root.exists() else []
        return
    shows_hidden = any(part.startswith(".") for part in rest)
    for path in root.glob("/".join(rest)):
        if shows_hidden or not any(part.startswith(".") for part in path.relative_to(root).parts):
            yield path
