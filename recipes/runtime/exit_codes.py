"""Exit codes of a run. 71, 74 and 75 follow sysexits.h."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a run; a sweep returns the worst code of its jobs."""

    FINISHED = 0
    CRASHED = 1
    INVALID_CONFIG = 2
    DIVERGED = 3
    CHECK_FAILED = 4  # of mode=preflight
    OUT_OF_MEMORY = 71  # EX_OSERR: the operating system could not provide a resource
    UNSAVED = 74  # EX_IOERR: the last checkpoint or a result could not be written, or any with on_save_error=stop
    PREEMPTED = 75  # EX_TEMPFAIL: stopped by a signal after saving; resume=auto continues
    INTERRUPTED = 130  # 128 + SIGINT, as a shell reports Ctrl-C
    TERMINATED = 143  # 128 + SIGTERM, stopped without a save
