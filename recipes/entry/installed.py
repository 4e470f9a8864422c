"""The command `lightning-recipes`: train.py of an installed wheel, run as `python train.py` runs it from a clone."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Put the installed folder first on the path, as Python does for a script, and run its train.py."""
    root = Path(__file__).parents[2]  # recipes/ and callbacks/ lie in it, under those names
    sys.path.insert(0, str(root))
    runpy.run_path(str(root / "train.py"), run_name="__main__")
