"""Train a run, and report how it ended as events, a final log line and an exit code."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from recipes.build import Run
from recipes.checkpoint.ending import describe_ending
from recipes.checkpoint.manifest import read_manifest
from recipes.checkpoint.resume import newest_checkpoint
from recipes.checkpoint.saver import CheckpointSaver
from recipes.config.commands import resume_command
from recipes.config.traits import declare_mode
from recipes.data.datamodule import StreamDataModule
from recipes.engine import get_engine
from recipes.entry.out_of_memory import write_error_report
from recipes.files import count
from recipes.lightning_internals import explain_missing_metric, get_callbacks, restore_within
from recipes.logger.summary import SummaryWriter
from recipes.mode.load import restoring
from recipes.mode.start import RunStartCallback, get_checkpoint_io, log_event
from recipes.run_folder import PAGE_FILE, read_summary
from recipes.runtime.console import LOGGER
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import is_out_of_memory, is_peer_failure, read_oom_of_other_rank
from recipes.runtime.own_code import describe_error
from recipes.runtime.signals import NOT_STARTED, Preempted, shown_name, waiting


@declare_mode(trains=True, takes_steps=True, reads_data=True)
def fit(run: Run) -> int:
    """Train from the beginning or from a checkpoint, to `trainer.max_steps`.

    Returns:
        The exit code, see `ExitCode`.

    Raises:
        Exception: The run crashed; the summary is written and the `end` event logged.
        KeyboardInterrupt: Ctrl-C before the first step, or a second one.
    """
    if run.checkpoint is not None and _find_ending(run, run.checkpoint) is not None:
        checkpoint = get_checkpoint_io(run).find_valid(run.checkpoint)
        run = replace(run, checkpoint=checkpoint)
        if (ended := _find_ending(run, checkpoint)) is not None:
            return _end_as_finished(run, ended)
    began = time.time()
    LOGGER.info(f"{run.name}: run folder {run.folder}")
    if isinstance(run.data, StreamDataModule):
        _prepare_data(run)
    get_callbacks(run.trainer).insert(0, RunStartCallback(run))
    try:
        _fit(run)
    except Preempted as stop:
        return _end_preempted(run, stop)
    except Exception as error:
        if (exit_code := getattr(error, "exit_code", None)) is not None:
            return _end_given_up(run, error, exit_code)
        _log_crash(run, error)
        raise
    [writer] = [callback for callback in get_callbacks(run.trainer) if isinstance(callback, SummaryWriter)]
    # also makes the other ranks wait until rank 0 has written it
    exit_code, failed = _judge_last_save(run)
    with waiting("the other ranks", exit_code=exit_code, outcome=failed or "the run is finished"):
        summary = get_engine(run.trainer).broadcast(writer.newest)
    if summary is None:  # nothing was trained: the time limit is that of all starts together
        ending = run.endings.find(run.trainer)
        why = "nothing to train" if ending is None else describe_ending(ending.as_fields())
        return _end_as_finished(run, f"is at step {run.trainer.global_step}: {why}")
    log_event(run, "end", run.trainer.global_step, status=summary["status"], by=summary["ended_by"])
    if summary["status"] == "diverged":
        LOGGER.error(f"Diverged: the training loss is NaN or inf; run folder: {run.folder}")
        return ExitCode.DIVERGED
    LOGGER.info(_last_line(summary, run.folder, since=began))
    if failed is not None:
        LOGGER.error(failed)
    return exit_code


def _prepare_data(run: Run) -> None:
    run.data.prepare_data()
    LOGGER.info(f"data: {run.data.source.describe()}{run.data.describe_validation(run.data.source)}")
    for name, source in run.data.eval_sources.items():
        part = "all of it, as it is not trained on" if f"eval_data.{name}" in run.other_data else "its validation split"
        read = run.data.describe_validation(source)
        LOGGER.info(f"eval_data.{name}: {source.describe()}; validated on {part}{read}")
    for doubt in run.data.find_doubts():
        LOGGER.warning(str(doubt))


def _find_ending(run: Run, checkpoint: Path) -> str | None:
    """Return why there is nothing to do after a checkpoint; None if the run goes on."""
    manifest = read_manifest(checkpoint)
    assert manifest is not None, f"{checkpoint} was valid when it was found"
    if manifest.step >= run.trainer.max_steps >= 0:
        last = run.trainer.max_steps
        return f"is at step {manifest.step}" + (
            f" of {last}" if manifest.step == last else f", past trainer.max_steps={last}"
        )
    with restoring(run, checkpoint):
        if manifest.ended is not None and run.endings.holds(manifest.ended):
            return f"is at step {manifest.step}: {describe_ending(manifest.ended)}"
    return None


def _end_as_finished(run: Run, why: str) -> int:
    """Report that a finished run has nothing to do, with its last line."""
    LOGGER.info(f"Nothing to do: {run.checkpoint or run.folder} {why}")
    summary = read_summary(run.folder)
    if summary is not None and summary.get("status") == "finished":
        LOGGER.info(_last_line(summary, run.folder))
    return ExitCode.FINISHED


def _fit(run: Run) -> None:
    """Train, and raise KeyboardInterrupt on Ctrl-C where it is no request to save."""
    if run.checkpoint is not None:
        restore_within(run.trainer, lambda: restoring(run))
    try:
        run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    except (MisconfigurationException, RuntimeError) as error:
        if (mistake := explain_missing_metric(error)) is None:
            raise
        raise mistake from error
    except SystemExit as exit_request:
        log_event(run, "end", run.trainer.global_step, status="interrupted")
        # Lightning turns Ctrl-C into exit(1), which looks like a crash
        if run.trainer.interrupted:
            raise KeyboardInterrupt from exit_request
        raise


def _log_crash(run: Run, error: Exception) -> None:
    """Log why training crashed on this rank, or on the peer that failed first."""
    step = run.trainer.global_step
    if is_out_of_memory(error):
        first_line = str(error).partition("\n")[0]
        rank = run.trainer.global_rank
        write_error_report(run.folder, rank=rank, step=step, error=first_line)
        _log_out_of_memory(run, rank=rank, step=step, error=first_line)
    elif not is_peer_failure(error):
        log_event(run, "end", step, status="failed", error=describe_error(error))
    elif (report := read_oom_of_other_rank(run.folder)) is not None:
        _log_out_of_memory(run, rank=report["rank"], step=report["step"], error=report["error"])
    else:
        reason = "another rank failed first; its error is on the console"
        log_event(run, "end", step, status="failed", error=reason)


def _log_out_of_memory(run: Run, *, rank: int, step: int, error: str) -> None:
    """Log that a rank, this one or another, ran out of memory."""
    log_event(run, "oom", step, rank=rank, error=error)
    log_event(run, "end", step, status="out_of_memory", error=error)


def _end_preempted(run: Run, stop: Preempted) -> int:
    """Report that a signal ended the run, and how to resume it."""
    log_event(run, "preempted", stop.step, signal=stop.by, saved=stop.saved)
    by = shown_name(stop.by)
    where = f"Stopped by {by} at step {stop.step}"
    to_resume = f"to resume: {resume_command(run.folder, run.overrides)}"
    newest = newest_checkpoint(run.folder)
    if stop.step == 0:
        outcome = NOT_STARTED.format(by)
        LOGGER.error(outcome)
    elif stop.saved:
        outcome = f"saved; {to_resume}"
        LOGGER.info(f"{where}, {outcome}")
    elif newest is not None:
        outcome = f"not saved; the newest checkpoint is {newest.name}; {to_resume}"
        LOGGER.error(f"{where}, {outcome}")
    else:
        outcome = "nothing was saved"
        LOGGER.error(f"{where}; {outcome}")
    unsaved = ExitCode.INTERRUPTED if by != stop.by else ExitCode.TERMINATED
    exit_code = ExitCode.PREEMPTED if stop.saved or stop.step == 0 else unsaved
    with waiting("the other ranks", exit_code=exit_code, outcome=outcome):
        get_engine(run.trainer).barrier()  # the launcher kills all ranks as soon as one has exited
    return exit_code


def _end_given_up(run: Run, error: Exception, exit_code: int) -> int:
    """Report that a callback or the saver ended the run; every rank decided this from values they agreed on."""
    status = "diverged" if exit_code == ExitCode.DIVERGED else "failed"
    log_event(run, "end", run.trainer.global_step, status=status, error=str(error))
    newest = newest_checkpoint(run.folder)
    good = "nothing was saved" if newest is None else f"the last good checkpoint is {newest}"
    LOGGER.error(f"{error}; {good}")
    with waiting("the other ranks", exit_code=exit_code, outcome=good):
        get_engine(run.trainer).barrier()  # the launcher kills all ranks as soon as one has exited
    return exit_code


def _judge_last_save(run: Run) -> tuple[int, str | None]:
    """Return 0 if the last state of the run is on disk, else the exit code for the reason and a line for the log."""
    [saver] = [callback for callback in run.trainer.checkpoint_callbacks if isinstance(callback, CheckpointSaver)]
    newest = saver.save_log.newest
    if newest is None or newest.is_valid:
        return ExitCode.FINISHED, None
    line = f"The last checkpoint of this run, {newest.path.name}, was not written"
    return ExitCode.DIVERGED if newest.rejected is not None else ExitCode.UNSAVED, line


_SPEEDS = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s"}  # the first that a run has


def _last_line(summary: dict[str, Any], folder: Path, *, since: float = 0.0) -> str:
    """Return the line of a finished run; with its report, unless that is of a start before a time in Unix seconds."""
    measures = summary.get("measures")
    is_good = not (
        isinstance(measures, dict) and "train/loss" in measures
    )  # else of a policy, which it says nothing of
    losses = ("train_loss", "val_loss") if is_good else ("val_loss",)
    values = {name: summary.get(name) for name in ("steps", *losses, *_SPEEDS)}
    known = {name: value for name, value in values.items() if isinstance(value, int | float)}  # of any summary.json
    parts = [count(int(known["steps"]), "step")] if "steps" in known else []
    parts += [f"{name.replace('_', ' ')} {known[name]:.4f}" for name in losses if name in known]
    parts += [f"{known[name]:,.0f} {unit}" for name, unit in _SPEEDS.items() if name in known][:1]
    page = folder / PAGE_FILE
    is_current = page.is_file() and page.stat().st_mtime >= since
    return f"Finished: {', '.join([*parts, f'report {page}' if is_current else f'in {folder}'])}"
