"""The benchmarks are scripts that import one another from their own folder: put it on the path, last."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
