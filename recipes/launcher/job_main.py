"""Main program of one job of a sweep: run the config in a `job.json`."""

import os
import sys
from pathlib import Path

from recipes.entry.run import run_resolved
from recipes.errors import ConfigError, format_report
from recipes.launcher.job import read_job
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.process import die_with_parent, exit_process
from recipes.runtime.signals import listen
from recipes.runtime.world import settle_ranks

WITH_PARENT = "--with-parent"  # the parent holds the other end of our standard input: die with it
CORES = "RECIPES_CORES"  # cores of this job if several jobs share a machine, such as `0,1,2`


def main() -> int:
    """Run the job and return its exit code."""
    *flags, file = sys.argv[1:]
    listen(on_second="ignore")  # the parent has blocked the signals until now
    if WITH_PARENT in flags:
        die_with_parent()
    for line in settle_ranks():
        print(line, file=sys.stderr)
    if CORES in os.environ:
        os.sched_setaffinity(0, map(int, os.environ.pop(CORES).split(",")))
    try:
        composed = read_job(Path(file)).composed
        assert composed is not None, "a job is composed before it is started"
        return run_resolved(composed)
    except ConfigError as mistake:
        print(format_report([mistake]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except KeyboardInterrupt:  # before the run began or after it ended
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    exit_process(main())
