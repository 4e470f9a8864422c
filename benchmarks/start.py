"""Seconds from a command to its help text, config error or first optimizer step. Fresh processes, warm cache."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import in_turn, report

ROOT = Path(__file__).parent.parent
NUM_ROUNDS = 5


def seconds_until(arguments: list[str], prefix: str) -> float:
    """Return the seconds from starting the command to its first output line with this prefix."""
    folder = tempfile.mkdtemp(prefix="benchmark_")
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "train.py", f"hydra.run.dir={folder}/run", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.lstrip().startswith(prefix):
            break
    else:
        raise RuntimeError(f"{arguments} ended without {prefix!r}")
    seconds = time.perf_counter() - began
    process.kill()
    process.wait()
    return seconds


def main() -> None:
    cases = {
        "python train.py --help": (["--help"], "lightning-recipes"),
        "python train.py modle=gpt2 (a config error)": (["modle=gpt2"], "The config has"),
        "python train.py, first optimizer step": ([], "step   1/"),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    seconds_until(*cases["python train.py, first optimizer step"])  # fills the cache
    for _ in in_turn(NUM_ROUNDS):
        for name, (arguments, prefix) in cases.items():
            found[name].append(seconds_until(arguments, prefix))
    report(
        "start",
        [
            {
                "command": name,
                "median, s": f"{statistics.median(seconds):.2f}",
                "slowest, s": f"{max(seconds):.2f}",
            }
            for name, seconds in found.items()
        ],
    )


if __name__ == "__main__":
    main()
