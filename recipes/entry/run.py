"""Execute one run from its composed config: folder, log, ranks, build, mode, and finally an exit code."""

import contextlib
import functools
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.checkpoint.retention import recover_interrupted
from recipes.config.check.paths import check_run_folder
from recipes.config.check.types import to_setting
from recipes.config.commands import resume_command
from recipes.config.compose import claim_folder
from recipes.config.resolved import ResolvedRun
from recipes.config.traits import list_nodes, select
from recipes.config.unread import list_unread
from recipes.entry.length import settle_length
from recipes.entry.light_import import without_unused_packages
from recipes.entry.out_of_memory import advise, check_room, describe_out_of_memory, log_exit
from recipes.entry.spawn import spawn_ranks
from recipes.errors import ConfigError, ConfigErrors, find_mistake, format_report, shell
from recipes.files import DISK_ERRORS, WriteError, count, describe
from recipes.run_folder import CHECKPOINTS, ENVIRONMENT_FILE, EVENTS_FILE, LOG_FILE, find_run_folder, has_checkpoint
from recipes.runtime import status
from recipes.runtime.console import LOGGER, open_console
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import (
    Failure,
    failure_from_exception,
    get_error_file,
    is_out_of_memory,
    write_failure,
)
from recipes.runtime.lock import lock_run_folder
from recipes.runtime.own_code import name_own_code
from recipes.runtime.signals import OnSecond, listening, requested_by, was_requested
from recipes.runtime.world import Ranks, global_rank, num_cores, num_gpus, started_by

_PEER_SECONDS = 2.0
# what the constructors of callbacks say about an argument
_OF_ARGUMENT = re.compile(r"(\w+) is (.*?); (.*); set (None|\w+=\[?<.*>\]?|\S+?)(?:,? .*)?")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: Exit code of a command, see `ExitCode`.
        run_folder: Its folder; that of a new run has got its final name when it started.
        error: Exception that ended it in this process.
        report: What has been reported of the error.
    """

    exit_code: int
    run_folder: Path
    error: BaseException | None = None
    report: str | None = None


def run_resolved(resolved: ResolvedRun, *, in_sweep: bool = False) -> int:
    """Execute one checked run in this process, or in one process per rank if it needs several and none exist yet.

    Args:
        resolved: The run.
        in_sweep: Whether other runs follow in this process; each then gets a separate process.

    Returns:
        The exit code, see `ExitCode`; after a crash the traceback of the rank that failed first has been logged.
    """
    return run_to_outcome(resolved, in_sweep=in_sweep).exit_code


def run_to_outcome(
    resolved: ResolvedRun, *, in_sweep: bool = False, shows_errors: bool = True, on_second: OnSecond = "exit"
) -> Outcome:
    """Execute one checked run as `run_resolved` does, and return what ended it.

    Args:
        resolved: The run.
        in_sweep: Whether other runs follow in this process; each then gets a separate process.
        shows_errors: Whether to print an error of this process; False writes it only to train.log.
        on_second: What a second request to stop does.
    """
    with contextlib.ExitStack() as around:
        if resolved.mode.trains and started_by() != "spawn":  # spawned ranks listen already
            around.enter_context(listening(on_second=on_second))
        # the ranks that this process starts show the line themselves
        if global_rank() == 0 and (resolved.ranks.started_by is not None or resolved.ranks.world_size == 1):
            around.enter_context(status.showing(resolved.mode.name, "loading torch"))
        outcome = _launch(resolved, in_sweep=in_sweep, shows_errors=shows_errors)
        is_saved_at_interrupt = outcome.exit_code == ExitCode.PREEMPTED and requested_by() == signal.SIGINT.name
        return replace(outcome, error=KeyboardInterrupt()) if is_saved_at_interrupt else outcome


def _launch(resolved: ResolvedRun, *, in_sweep: bool, shows_errors: bool) -> Outcome:
    try:
        ranks = resolved.ranks
        resolved = _open_log(resolved, is_new=started_by() is None)
    except ConfigError as mistake:
        return _report_mistake(mistake, resolved, shows_errors)
    if resolved.resume not in (None, "auto") and global_rank() == 0:
        resumed = find_run_folder(Path(resolved.resume))
        if resumed is not None and not (resumed / ENVIRONMENT_FILE).is_file():
            LOGGER.info(f"{resumed} has no {ENVIRONMENT_FILE}: what it was started with is inferred from its config")
    if resolved.dropped_overrides and global_rank() == 0:
        dropped = " ".join(resolved.dropped_overrides)
        LOGGER.info(f"Overrides of the resumed run dropped because their option was replaced: {dropped}")
    if resolved.added_settings and global_rank() == 0:
        added = ", ".join(resolved.added_settings)
        LOGGER.info(f"The config of the resumed run is of an earlier version; from conf/ are: {added}")
    for line in resolved.left_out if global_rank() == 0 and resolved.mode.trains else ():
        LOGGER.info(line)
    if global_rank() == 0 and (unread := list_unread(resolved)):
        verb = "has" if len(unread) == 1 else "have"
        LOGGER.info(f"{', '.join(unread)} {verb} no effect in mode={resolved.mode.name}")
    try:  # once, by whoever starts the ranks: each of them is given the number of steps
        resolved = settle_length(resolved)
    except (KeyboardInterrupt, Exception) as error:
        return _end(error, resolved, shows_errors)
    is_single = ranks.world_size == 1 and not in_sweep
    if is_single or ranks.started_by is not None:
        return _execute(resolved, shows_errors)
    try:
        # every rank looks for the newest checkpoint: an earlier run must have written its last one by now
        with _locked_folder(resolved):
            pass
        LOGGER.info(_announce(ranks, resolved))
        # until all ranks have exited, only rank 0 writes train.log
        result = spawn_ranks(resolved, ranks)
    except ConfigError as mistake:
        return _report_mistake(mistake, resolved, shows_errors)
    if result.exit_code == ExitCode.OUT_OF_MEMORY:
        log_exit(resolved.run_folder, resolved.run_folder / EVENTS_FILE)
    if result.report is not None:
        _open_log(resolved)
        LOGGER.error(result.report)
        if result.crashed:
            LOGGER.error(f"The run crashed{_describe_folder(resolved)}")
        elif result.exit_code != ExitCode.INVALID_CONFIG:
            LOGGER.error(f"The run ended early{_describe_folder(resolved)}")
    if result.exit_code == ExitCode.OUT_OF_MEMORY:
        _log_advice(resolved, result.report or "")
    return Outcome(exit_code=result.exit_code, run_folder=resolved.run_folder, report=result.report)


def _announce(ranks: Ranks, resolved: ResolvedRun) -> str:
    """Return a line on the processes that are started, which import torch before they print anything."""
    head = f"starting {count(ranks.world_size, 'rank')}"
    if resolved.accelerator != "cpu" and (gpus := num_gpus()):
        return f"{head}, one per GPU of {gpus}"
    cores = f"{'processes' if ranks.world_size > 1 else 'a process'} on the CPU, with {count(num_cores(), 'core')}"
    return f"{head}: {cores}" if resolved.accelerator == "cpu" else f"{head}: no GPU is found here, so {cores}"


def _log_advice(resolved: ResolvedRun, report: str) -> None:
    for line in advise(resolved, report=report):
        LOGGER.error(line)


def _open_log(resolved: ResolvedRun, *, is_new: bool = False) -> ResolvedRun:
    """Create the run folder and open its log. Only rank 0 logs progress and writes the file.

    Args:
        resolved: The run.
        is_new: Whether nothing has started yet, so that a timestamped folder may still be renamed.

    Returns:
        The run, with its final folder.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    speaks = global_rank() == 0
    try:
        if resolved.mode.trains:
            resolved = claim_folder(resolved) if is_new else resolved
            resolved.run_folder.mkdir(parents=True, exist_ok=True)
        open_console(resolved.run_folder / LOG_FILE if resolved.mode.trains and speaks else None, speaks=speaks)
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir={resolved.run_folder}",
            f"the folder cannot be written to: {error.strerror}",
            "hydra.run.dir=<a folder of yours>",
        ) from error
    return resolved


@contextlib.contextmanager
def _locked_folder(resolved: ResolvedRun) -> Iterator[None]:
    """On rank 0, lock the folder of a training run and repair interrupted checkpoint renames.

    Raises:
        ConfigError: Another process holds the lock, or has run in the folder since the config was checked.
    """
    if not resolved.mode.trains or global_rank() != 0:
        yield
        return
    with lock_run_folder(resolved.run_folder):
        # the folder may have changed since the check: another start may have held the lock until now
        for mistake in check_run_folder(resolved):
            raise mistake
        try:
            recover_interrupted(resolved.run_folder / CHECKPOINTS)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={resolved.run_folder}",
                f"{error.filename or CHECKPOINTS} cannot be changed: {describe(error)}",
                f"{shell('chmod -R u+rwX', resolved.run_folder)}, or hydra.run.dir=<another folder>",
            ) from error
        yield


def _report_mistake(mistake: ConfigError, resolved: ResolvedRun, shows_errors: bool) -> Outcome:
    """Report a config error found before the log exists; once, even if every rank finds it."""
    report = format_report([mistake])
    if (file := get_error_file()) is not None and started_by() is not None:
        write_failure(_failure_from_mistake(mistake), file)
    elif global_rank() == 0 and shows_errors:
        print(report, file=sys.stderr)
    return Outcome(exit_code=ExitCode.INVALID_CONFIG, run_folder=resolved.run_folder, error=mistake, report=report)


def _failure_from_mistake(mistake: ConfigError, *, head: str | None = None) -> Failure:
    return failure_from_exception(mistake, exit_code=ExitCode.INVALID_CONFIG, report=format_report([mistake], head))


def _execute(resolved: ResolvedRun, shows_errors: bool) -> Outcome:
    """Execute the run, or its part on this rank, in this process."""
    try:
        with _locked_folder(resolved):
            with without_unused_packages(resolved.list_targets()):
                from recipes.build import execute

            status.say("building the model and opening the data")
            exit_code = execute(resolved, check_room=functools.partial(check_room, resolved))
        return Outcome(exit_code=exit_code, run_folder=resolved.run_folder)
    except (KeyboardInterrupt, Exception) as error:
        return _end(error, resolved, shows_errors)


def _end(error: BaseException, resolved: ResolvedRun, shows_errors: bool) -> Outcome:
    """Report what ended the run, or its part on this rank, in this process."""
    ranks, folder = resolved.ranks, resolved.run_folder
    if isinstance(error, KeyboardInterrupt):
        if global_rank() == 0:
            LOGGER.error(f"Interrupted{_describe_folder(resolved)}")
            if has_checkpoint(folder):
                LOGGER.error(f"To resume: {resume_command(folder, resolved.overrides)}")
            elif resolved.mode.trains:
                LOGGER.error("No checkpoint has been saved; to start again: the same command")
        return Outcome(exit_code=ExitCode.INTERRUPTED, run_folder=folder, error=error)
    last_line: str | None = f"The run crashed{_describe_folder(resolved)}"
    if is_out_of_memory(error):
        is_advised = ranks.started_by in (None, "spawn")  # once all ranks have ended
        text = describe_out_of_memory(error, resolved, lists_remedies=not is_advised)
        failure = failure_from_exception(error, exit_code=ExitCode.OUT_OF_MEMORY, report=text)
        last_line = f"The run ended early{_describe_folder(resolved)}"
    elif isinstance(error, ConfigErrors):
        text = format_report(error.mistakes, error.head)
        failure = failure_from_exception(error, exit_code=ExitCode.INVALID_CONFIG, report=text)
        last_line = None
    elif (mistake := _find_mistake(error, resolved)) is not None:
        failure = _failure_from_mistake(mistake, head=getattr(find_mistake(error), "late", None))
        last_line = None
    elif isinstance(error, WriteError):
        # a result, a cache, a prepared document: training handles the files that it can go on without
        text = f"{error.filename} could not be written: {describe(error)}; make room, then the same command"
        failure = failure_from_exception(error, exit_code=ExitCode.UNSAVED, report=text)
        last_line = None
    else:
        report = "".join(traceback.format_exception(error))
        if (own := name_own_code(error)) is not None:
            report = f"{report}\n{own}"
        failure = failure_from_exception(error, exit_code=ExitCode.CRASHED, report=report)
    _report_failure(failure, last_line, ranks, shows_errors)
    if failure.exit_code == ExitCode.OUT_OF_MEMORY and ranks.started_by is None:
        _log_advice(resolved, failure.report)
    return Outcome(exit_code=failure.exit_code, run_folder=folder, error=error, report=failure.report)


def _report_failure(failure: Failure, last_line: str | None, ranks: Ranks, shows_errors: bool) -> None:
    """Report a failure once for all ranks: in the error file if a launcher reads it, else on the console."""
    if failure.caused_by_peer and ranks.started_by == "torchrun":
        # torchrun blames the error file with the earliest timestamp, in whole seconds: too coarse to separate cause and
        # consequence. Wait before writing: once it sees the rank that failed first, it ends this one by SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if was_requested():  # the SIGTERM came before this rank noticed the lost peer
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_PEER_SECONDS)
    file = get_error_file() if ranks.started_by is not None else None
    full_report = failure.report if last_line is None else f"{failure.report}\n{last_line}"
    if file is not None:
        # our own parent process adds the last line itself; torchrun prints the report unchanged
        is_spawned = ranks.started_by == "spawn"
        write_failure(replace(failure, report=failure.report if is_spawned else full_report), file)
        if not is_spawned and global_rank() == 0:
            LOGGER.error(full_report, extra={"console": False})
    elif failure.caused_by_peer and ranks.world_size > 1 and global_rank() > 0:
        LOGGER.error(f"rank {global_rank()} of {ranks.world_size} lost its peers")
    else:
        LOGGER.error(failure.report, extra={"console": shows_errors})
        if last_line is not None:
            LOGGER.error(last_line, extra={"console": shows_errors})


def _find_mistake(error: BaseException, resolved: ResolvedRun) -> ConfigError | None:
    """Return the config error that an exception is or wraps, or that a constructor raised about its arguments."""
    if (mistake := find_mistake(error)) is not None:
        return _without_added(_name_where_set(mistake, resolved.config), resolved.overrides)
    if isinstance(error, OSError):
        is_full = error.errno in DISK_ERRORS
        return None if is_full else _find_unwritable_path(error, select(resolved.config, "mode.path"))
    # Hydra's exception, by name: Hydra is not imported here
    if type(error).__name__ != "InstantiationException" or not isinstance(error.__cause__, TypeError | ValueError):
        return None
    target = re.search(r"call to target '([^']+)'", str(error))
    section = _find_section(resolved.config, target[1]) if target else None
    if section is None:
        return None
    reason = " ".join(str(error.__cause__).split())
    settings: Any = select(resolved.config, section)
    if (named := _OF_ARGUMENT.fullmatch(reason)) and named[1] in settings:
        key, fix = f"{section}.{named[1]}", named[4].removeprefix(f"{named[1]}=")
        value = named[2].strip("'")
        mistake = ConfigError(f"{key}={value}", named[3], f"{key}={'null' if fix == 'None' else fix}")
        return _name_where_set(mistake, resolved.config)  # of several nodes of this class
    return ConfigError(f"{section}.…", reason, f"{section}.<setting>=<another value>")


def _without_added(mistake: ConfigError, overrides: Sequence[str]) -> ConfigError:
    """Return an error whose remedy removes a node with the one for a node that this command line adds."""
    key = mistake.fix.strip("'").removeprefix("~")
    is_added = mistake.fix.startswith("'~") and any(text.startswith((f"+{key}=", f"+{key}.")) for text in overrides)
    return ConfigError(mistake.setting, mistake.reason, f"the same command without {key}") if is_added else mistake


def _name_where_set(mistake: ConfigError, config: Mapping[str, Any]) -> ConfigError:
    """Return an error about a setting that has another value with the key that has this one.

    A component does not know whether its `seq_len` is the default, that of the run, or was typed as `data.seq_len`.
    """
    first, space, others = mistake.setting.partition(" ")
    key, _, value = first.partition("=")
    name = key.rpartition(".")[2]
    if not re.fullmatch(r"[\w.]+", key) or to_setting(select(config, key)) == value:
        return mistake
    found = [path for path, node in list_nodes(config) if name in node and to_setting(node[name]) == value]
    if len(found) != 1:
        return mistake
    fix = re.sub(rf"(?<![\w.]){re.escape(key)}=", f"{found[0]}.{name}=", mistake.fix)
    return ConfigError(f"{found[0]}.{name}={value}{space}{others}", mistake.reason, fix)


def _find_unwritable_path(error: OSError, path: object) -> ConfigError | None:
    """Return a config error if the exception is about the path that `mode.path` names, or a folder above it."""
    if not isinstance(path, str) or not isinstance(error.filename, str):
        return None
    wanted, failed = Path(os.path.expanduser(path)).absolute(), Path(error.filename).absolute()
    # the path, a file below it, a folder above it, or a temporary file next to it
    is_beside = failed.parent == wanted.parent and wanted.name in failed.name
    if wanted not in (failed, *failed.parents) and failed not in wanted.parents and not is_beside:
        return None
    return ConfigError(f"mode.path={path}", f"it cannot be written to: {error.strerror}", "mode.path=<another path>")


def _find_section(config: Mapping[str, Any], target: str) -> str | None:
    """Return the key of the section whose target is built; a re-exported name has the same ending."""
    name = target.rpartition(".")[2]
    return next((path for path, node in list_nodes(config) if node["_target_"].rpartition(".")[2] == name), None)


def _describe_folder(resolved: ResolvedRun) -> str:
    """Return the end of a sentence that names the run folder; empty if this mode has made none."""
    from recipes.checkpoint.resume import newest_checkpoint

    if not resolved.run_folder.is_dir():
        return ""
    checkpoint = newest_checkpoint(resolved.run_folder)
    suffix = f", last valid checkpoint: {checkpoint.name}" if checkpoint else ""
    return f"; run folder: {resolved.run_folder}{suffix}"
