"""The main of one job of a sweep: the run that `job.json` holds, in a process of its own."""

import os
import sys
from pathlib import Path

from recipes.entry.run import run_composed
from recipes.launcher.job import read_job
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.process import die_with_parent, exit_process
from recipes.runtime.signals import listen

WITH_PARENT = "--with-parent"  # whose end of our standard input says whether it lives
CORES = "RECIPES_CORES"  # names the cores of this job, where several share a machine


def main() -> int:
    """Carry out the job; its exit code."""
    *flags, file = sys.argv[1:]
    listen(second_ends=False)  # held back by our starter
    if WITH_PARENT in flags:
        die_with_parent()
    if CORES in os.environ:
        os.sched_setaffinity(0, map(int, os.environ.pop(CORES).split(",")))
    composed = read_job(Path(file)).composed
    assert composed is not None, "a job that is started has been composed"
    try:
        return run_composed(composed)
    except KeyboardInterrupt:  # before the run began or after it ended
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    exit_process(main())
