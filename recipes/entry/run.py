"""Start one run from its composed config: folder, log, ranks, build, mode; and how it ends."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace

from recipes.checkpoint.retention import recover_interrupted
from recipes.config.compose import Composed
from recipes.config.ranks import get_ranks
from recipes.entry.out_of_memory import describe_out_of_memory, log_exit
from recipes.entry.spawn import spawn_ranks
from recipes.errors import ConfigError, format_report
from recipes.run_folder import CHECKPOINTS, EVENTS_FILE, LOG_FILE, has_checkpoint
from recipes.runtime.console import LOGGER, open_console
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import (
    Failure,
    error_file,
    is_out_of_memory,
    make_failure,
    write_failure,
)
from recipes.runtime.lock import lock_run_folder
from recipes.runtime.signals import listening, was_requested
from recipes.runtime.world import Ranks, global_rank, started_by

_PEER_SECONDS = 2.0


def run_composed(composed: Composed, *, in_sweep: bool = False) -> int:
    """Carry out one checked run: here, or in as many processes as it asks for where nobody has started them.

    Args:
        composed: The run.
        in_sweep: Whether other runs follow in this process, which then carries out none of them itself.

    Returns:
        The exit code: 0 finished, 2 the config is wrong, 71 out of memory, 75 preempted, 130 interrupted,
        143 terminated, 1 a crash (the traceback of the rank that failed first is printed and logged).
    """
    with contextlib.ExitStack() as signals:
        if composed.trains and started_by() != "us":  # the ranks that we start listen already
            signals.enter_context(listening())
        return _launch(composed, in_sweep=in_sweep)


def _launch(composed: Composed, *, in_sweep: bool) -> int:
    try:
        ranks = get_ranks(composed.config)
        _open(composed)
    except ConfigError as mistake:
        return _refused(mistake)
    alone = ranks.world_size == 1 and not in_sweep
    if alone or ranks.started_by is not None:
        return _here(composed, ranks)
    try:
        with _held(composed):
            pass  # every rank looks for its checkpoint: not before an earlier run has written its last
    except ConfigError as mistake:
        return _refused(mistake)
    # train.log is rank 0's until all ranks have ended
    ending = spawn_ranks(composed, ranks)
    if ending.exit_code == ExitCode.OUT_OF_MEMORY:
        log_exit(composed.run_folder, composed.run_folder / EVENTS_FILE)
    if ending.report is not None:
        _open(composed)
        LOGGER.error(ending.report)
        if ending.crashed:
            LOGGER.error(f"The run crashed; its folder is {_where(composed)}")
        elif ending.exit_code != ExitCode.INVALID_CONFIG:
            LOGGER.error(f"The run ended early; its folder is {_where(composed)}")
    return ending.exit_code


def _open(composed: Composed) -> None:
    """The run's folder and log. Only rank 0 speaks, and keeps what it says.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    speaks = global_rank() == 0
    try:
        if composed.trains:
            composed.run_folder.mkdir(parents=True, exist_ok=True)
        open_console(
            composed.run_folder / LOG_FILE if composed.trains and speaks else None, speaks=speaks
        )
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir={composed.run_folder}",
            f"the folder cannot be written to: {error.strerror}",
            "hydra.run.dir=<a folder of yours>",
        ) from error


@contextlib.contextmanager
def _held(composed: Composed) -> Iterator[None]:
    """The folder of a run that trains, by rank 0; what a kill has left there without a name has it again."""
    if not composed.trains or global_rank() != 0:
        yield
        return
    with lock_run_folder(composed.run_folder):
        recover_interrupted(composed.run_folder / CHECKPOINTS)
        yield


def _refused(mistake: ConfigError) -> int:
    """A mistake before there is a log to write to; where several ranks make it, one says it."""
    if (file := error_file()) is not None and started_by() is not None:
        text = format_report([mistake])
        write_failure(make_failure(mistake, exit_code=ExitCode.INVALID_CONFIG, report=text), file)
    elif global_rank() == 0:
        print(format_report([mistake]), file=sys.stderr)
    return ExitCode.INVALID_CONFIG


def _here(composed: Composed, ranks: Ranks) -> int:
    """The run, or this rank of it, in this process."""
    try:
        with _held(composed):
            from recipes.build import execute

            return execute(composed)
    except KeyboardInterrupt:
        if global_rank() == 0:
            LOGGER.error(f"Interrupted; the run's folder is {_where(composed)}")
            if has_checkpoint(composed.run_folder):
                LOGGER.error(f"To go on: python train.py resume={composed.run_folder}")
        return ExitCode.INTERRUPTED
    except Exception as error:
        last_line: str | None = f"The run crashed; its folder is {_where(composed)}"
        if is_out_of_memory(error):
            text = describe_out_of_memory(error, composed, world_size=ranks.world_size)
            failure = make_failure(error, exit_code=ExitCode.OUT_OF_MEMORY, report=text)
            last_line = f"The run ended early; its folder is {_where(composed)}"
        elif (wrapped := _mistake_behind(error)) is not None:
            failure = make_failure(
                wrapped, exit_code=ExitCode.INVALID_CONFIG, report=format_report([wrapped])
            )
            last_line = None
        else:
            failure = make_failure(error, exit_code=ExitCode.CRASHED, report=traceback.format_exc())
        _tell(failure, last_line, ranks)
        return failure.exit_code


def _tell(failure: Failure, last_line: str | None, ranks: Ranks) -> None:
    """Say it once for all ranks: in the file that their starter reads, else on the console."""
    if failure.by_peer and ranks.started_by == "torchrun":
        # torchrun counts whole seconds, and ends us within this time once it sees the rank that failed first
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if was_requested():  # it has seen it before we lost the peer
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_PEER_SECONDS)
    file = error_file() if ranks.started_by is not None else None
    whole = failure.report if last_line is None else f"{failure.report}\n{last_line}"
    if file is not None:
        # the parent that we are adds the last line itself; torchrun shows what it is given
        shown = failure.report if ranks.started_by == "us" else whole
        write_failure(replace(failure, report=shown), file)
        if ranks.started_by != "us" and global_rank() == 0:
            LOGGER.error(whole, extra={"console": False})
    elif failure.by_peer and ranks.world_size > 1 and global_rank() > 0:
        LOGGER.error(f"rank {global_rank()} of {ranks.world_size} lost its peers")
    else:
        LOGGER.error(failure.report)
        if last_line is not None:
            LOGGER.error(last_line)


def _mistake_behind(error: BaseException | None) -> ConfigError | None:
    """The mistake that an error is or wraps: Hydra wraps whatever a constructor raises."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    return error


def _where(composed: Composed) -> str:
    from recipes.checkpoint.resume import newest_checkpoint

    checkpoint = newest_checkpoint(composed.run_folder)
    last = f", its last whole checkpoint {checkpoint.name}" if checkpoint else ""
    return f"{composed.run_folder}{last}"
