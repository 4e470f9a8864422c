"""The lines of shell around a run in a job of SLURM, and what is handed on to it."""

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.launcher.environ import clean_environ
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.process import python_path

# Runs a rank. srun answers with the largest code of its tasks: one that fails must not be hidden by the others, which
# are told to stop and answer 75; and a signal before the run listens has lost nothing.
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
# the element of an array, never the array: a requeue of that would queue all of them
_NAME_OF_JOB = (
    "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID};"
    " job=${job:-$SLURM_JOB_ID}"
)


def before_ranks(folder: Path) -> str:
    """Take away what an earlier start of the job has left.

    Args:
        folder: Of the exit codes.
    """
    return f"{_NAME_OF_JOB}; rm -f {shlex.quote(str(folder.resolve()))}/code_$job"


def after_ranks(folder: Path) -> list[str]:
    """In the batch script: scancel ends it before it comes here, preemption does not."""
    return [
        "code=$?",
        _NAME_OF_JOB,
        f"echo $code > {shlex.quote(str(folder.resolve()))}/code_$job",
        f"if [ $code = {ExitCode.PREEMPTED} ]; then scontrol requeue $job; fi",
        "exit $code",
    ]


@contextmanager
def job_environ() -> Iterator[None]:
    """sbatch hands our environment on: without what an allocation or a rank has left in it."""
    before = dict(os.environ)
    ours = clean_environ() | {"PYTHONPATH": python_path()}
    try:
        os.environ.clear()
        os.environ.update(ours)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
