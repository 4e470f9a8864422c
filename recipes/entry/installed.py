"""Console script `lightning-recipes`: runs train.py of an installed wheel like `python train.py` in a clone."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Put the installed folder first on `sys.path`, as Python does for a script, and run its train.py."""
    root = Path(__file__).parents[2]  # contains recipes/ and callbacks/
    sys.path.insert(0, str(root))
    runpy.run_path(str(root / "train.py"), run_name="__main__")
