"""How a process ends, as its exit code. 71, 74 and 75 are those of sysexits.h with the nearest meaning."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a run; a sweep ends with the worst of its jobs."""

    FINISHED = 0
    CRASHED = 1
    INVALID_CONFIG = 2
    DIVERGED = 3
    OUT_OF_MEMORY = 71  # EX_OSERR: what the operating system could not provide
    UNSAVED = 74  # EX_IOERR: finished, but the last checkpoint could not be written
    PREEMPTED = 75  # EX_TEMPFAIL: stopped by a signal after saving; resume=auto continues
    INTERRUPTED = 130  # what a shell reports for Ctrl-C
    TERMINATED = 143  # what a shell reports for SIGTERM
