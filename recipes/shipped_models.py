"""Small models by name, of which the configuration comes with the package, and no weights. Imports no torch.

They are trained from the beginning, where a demo or a test is not to download anything.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "model" / "shipped"
SHIPPED = tuple(sorted(folder.name for folder in _FOLDER.iterdir() if folder.is_dir()))


def find_model(name: str) -> str:
    """Return the folder of a published model; or the name itself, of what may be a repository of the hub.

    Args:
        name: A folder, the name of a shipped model, or a hub name. What is a folder here is that folder.
    """
    folder = os.path.expanduser(name)
    return str(_FOLDER / name) if is_shipped(name) else folder


def is_shipped(name: str) -> bool:
    """Return whether a name is that of a shipped model."""
    return name in SHIPPED and not os.path.isdir(name)
