"""Shell lines around a run in a SLURM job, and the environment that sbatch exports to it."""

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.launcher.environ import clean_environ
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.process import python_path

# Runs a rank. srun returns the largest exit code of its tasks. A failed rank must not be hidden by the others, which
# are then signalled to stop and return 75, so failures get 100 added. A signal before the run listens is also 75.
TASK = f"""\
trap : TERM USR1
"$@"
code=$?
case $code in
  0|{ExitCode.PREEMPTED}) exit $code ;;
  {128 + signal.SIGUSR1}|{128 + signal.SIGTERM}) exit {ExitCode.PREEMPTED} ;;
esac
[ $code -lt 100 ] && code=$((code + 100))
exit $code
"""
# the id of an array element, not of the array: requeueing the array would requeue every job
_SET_JOB = "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}"


def before_ranks(folder: Path) -> str:
    """Return the line that deletes the exit code of the job's previous start.

    Args:
        folder: Folder with the exit codes.
    """
    return f"{_SET_JOB}; rm -f {shlex.quote(str(folder.resolve()))}/code_$job"


def after_ranks(folder: Path) -> list[str]:
    """Return the lines that write the exit code and requeue a preempted job.

    scancel ends the batch script before these lines; preemption does not.

    Args:
        folder: Folder with the exit codes.
    """
    return [
        "code=$?",
        _SET_JOB,
        f"echo $code > {shlex.quote(str(folder.resolve()))}/code_$job",
        f"if [ $code = {ExitCode.PREEMPTED} ]; then scontrol requeue $job; fi",
        "exit $code",
    ]


@contextmanager
def job_environ() -> Iterator[None]:
    """Remove variables of an allocation or a rank from the environment, since sbatch exports it to the job."""
    before = dict(os.environ)
    cleaned = clean_environ() | {"PYTHONPATH": python_path()}
    try:
        os.environ.clear()
        os.environ.update(cleaned)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
