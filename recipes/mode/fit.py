"""Train, and leave behind what the contract names."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback

from recipes.build import Run
from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.resume import newest_checkpoint, step_of
from recipes.checkpoint.saver import CheckpointSaver
from recipes.entry.out_of_memory import write_error_report
from recipes.logger.csv import CsvLogger
from recipes.logger.writers import SummaryWriter
from recipes.mode.start import header
from recipes.run_folder import ENVIRONMENT_FILE, EVENTS_FILE, OOM_FOLDER, TOKENIZER_FOLDER
from recipes.runtime.console import LOGGER
from recipes.runtime.environment import describe_environment
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import is_out_of_memory, is_peer_failure, read_peer_error
from recipes.runtime.signals import Preempted


class GaveUpError(Exception):
    """A callback has ended the run on purpose.

    Args:
        why: One line.
        exit_code: What the process ends with.
    """

    def __init__(self, why: str, exit_code: int) -> None:
        super().__init__(why)
        self.exit_code = exit_code


class RunStartCallback(Callback):
    """Says what is trained, and writes the config, once everything is built and every state restored.

    Until then a resume that fails leaves the run it meant as it was.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.has_begun = False

    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        """All ranks go on from one checkpoint: a shared file system may for a moment show them different ones."""
        mine = str(self._run.checkpoint)
        if (first := trainer.strategy.broadcast(mine)) != mine:
            raise RuntimeError(
                f"resume=…: rank {trainer.global_rank} sees {mine} as the newest checkpoint, rank 0 {first};"
                " start again, or resume=<one checkpoint>"
            )

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.has_begun = True
        if not trainer.is_global_zero:
            return
        run, step = self._run, trainer.global_step
        used = (run.folder / EVENTS_FILE).exists()
        run.freeze()
        for word in (run.folder / OOM_FOLDER).glob("rank_*.json"):
            word.unlink()  # of an earlier start
        record = describe_environment(run.overrides) | {
            "tags": run.tags,
            "num_ranks": trainer.world_size,
        }
        (run.folder / ENVIRONMENT_FILE).write_text(json.dumps(record, indent=2) + "\n")
        tokenizer = run.data.source.tokenizer
        if tokenizer is not None:
            tokenizer.save(run.folder / TOKENIZER_FOLDER)
        for logger in trainer.loggers:
            if used and hasattr(logger, "resume_at"):
                logger.resume_at(step, num_rollbacks=_num_rollbacks(trainer))
        if step:
            self._tell_resume(step)
        else:
            _log_event(run, "start", step)
        for line in header(run, resumed_from=_checkpoint_io(run).loaded):
            LOGGER.info(line)

    def _tell_resume(self, step: int) -> None:
        run, io = self._run, _checkpoint_io(self._run)
        for refused in io.refused:
            _log_event(run, "checkpoint_rejected", step, path=refused.path.name, why=refused.why)
        assert io.loaded is not None, "a run that is past step 0 has loaded a checkpoint"
        # a run killed between the checkpoint and the line that tells of it
        ours = io.loaded.parents[1] == run.folder.resolve()
        [told] = [one for one in run.trainer.loggers if isinstance(one, CsvLogger)]
        if ours and not told.has_event("checkpoint", step):
            _log_event(run, "checkpoint", step, path=io.loaded.name)
        _log_event(run, "resume", step, path=io.loaded.name)


def fit(run: Run) -> int:
    """Train from the beginning or from a checkpoint, to `trainer.max_steps`.

    Returns:
        0, or 3 where the loss is no number in the end; a crash leaves by its exception, after the summary is
        written.
    """
    if run.checkpoint is not None and step_of(run.checkpoint) >= run.trainer.max_steps:
        checkpoint = _checkpoint_io(run).whole(run.checkpoint)
        run = replace(run, checkpoint=checkpoint)
        if (step := step_of(checkpoint)) >= run.trainer.max_steps:
            LOGGER.info(f"Nothing to do: {checkpoint} is at step {step} of {run.trainer.max_steps}")
            return 0
    LOGGER.info(f"{run.name}: the run's folder is {run.folder}")
    run.data.prepare_data()
    LOGGER.info(f"data: {run.data.source.describe()}")
    run.trainer.callbacks.insert(0, RunStartCallback(run))  # type: ignore[attr-defined]
    try:
        _fit(run)
    except Preempted as stopped:
        return _preempted(run, stopped)
    except GaveUpError as error:
        return _gave_up(run, error)
    [writer] = [one for one in run.trainer.callbacks if isinstance(one, SummaryWriter)]  # type: ignore[attr-defined]
    summary = run.trainer.strategy.broadcast(writer.newest)  # and until rank 0 has written it
    assert summary is not None, "training has ended"
    if summary["train_loss"] is None:
        LOGGER.error(f"Diverged: the training loss is no number; the run's folder is {run.folder}")
        return ExitCode.DIVERGED
    LOGGER.info(_last_line(summary, run.folder))
    return _exit_code_of_saves(run)


def _exit_code_of_saves(run: Run) -> int:
    """A run whose last state is not on the disk has not ended well."""
    [saver] = [one for one in run.trainer.checkpoint_callbacks if isinstance(one, CheckpointSaver)]
    newest = saver.finished.newest
    if newest is None or newest.is_whole:
        return 0
    LOGGER.error(f"The last checkpoint of this run, {newest.path.name}, was not written")
    return ExitCode.DIVERGED if newest.refused is not None else ExitCode.UNSAVED


def _preempted(run: Run, stopped: Preempted) -> int:
    """A signal has ended the run."""
    _log_event(run, "preempted", stopped.step, signal=stopped.by, saved=stopped.saved)
    where = f"Stopped by {stopped.by} at step {stopped.step}"
    to_go_on = f"to go on: python train.py resume={run.folder}"
    newest = newest_checkpoint(run.folder)
    if stopped.saved:
        LOGGER.info(f"{where}, saved; {to_go_on}")
    elif newest is not None:
        LOGGER.error(f"{where}, which is not saved; {newest.name} is; {to_go_on}")
    else:
        LOGGER.error(f"{where}; nothing was saved")
    run.trainer.strategy.barrier()  # a rank that has ended ends the others, wherever they are
    return ExitCode.PREEMPTED if stopped.saved else ExitCode.TERMINATED


def _gave_up(run: Run, error: GaveUpError) -> int:
    """All ranks have, from the same numbers."""
    _log_event(run, "end", run.trainer.global_step, status="diverged", error=str(error))
    newest = newest_checkpoint(run.folder)
    good = "nothing was saved" if newest is None else f"the last good checkpoint is {newest}"
    LOGGER.error(f"{error}; {good}")
    run.trainer.strategy.barrier()  # a rank that has ended ends the others, wherever they are
    return error.exit_code


def _fit(run: Run) -> None:
    try:
        run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    except SystemExit as left:
        _log_event(run, "end", run.trainer.global_step, status="interrupted")
        # Lightning turns Ctrl-C into exit(1), which a crash looks like too
        if run.trainer.interrupted:
            raise KeyboardInterrupt from left
        raise
    except Exception as error:
        if (exit_code := getattr(error, "exit_code", None)) is not None:
            raise GaveUpError(str(error), exit_code) from error
        if is_out_of_memory(error):
            _tell_out_of_memory(run, error)
            raise
        what = f"{type(error).__name__}: {error}"
        if is_peer_failure(error):
            what = "another rank failed first; what it said is on the console"
            if (word := read_peer_error(run.folder)) is not None:
                _tell_full(run, word)
                raise
        _log_event(run, "end", run.trainer.global_step, status="failed", error=what)
        raise
    _log_event(run, "end", run.trainer.global_step, status="finished")


def _tell_out_of_memory(run: Run, error: Exception) -> None:
    told: dict[str, Any] = {"rank": run.trainer.global_rank, "step": run.trainer.global_step}
    told |= {"error": str(error).partition("\n")[0]}
    with contextlib.suppress(OSError):  # a full disk is not what ends this run
        write_error_report(run.folder, **told)
    _tell_full(run, told)


def _tell_full(run: Run, told: dict[str, Any]) -> None:
    """By the first rank, of itself or of another one."""
    step, error = told["step"], told["error"]
    _log_event(run, "oom", step, rank=told["rank"], error=error)
    _log_event(run, "end", step, status="out_of_memory", error=error)


def _num_rollbacks(trainer: lightning.Trainer) -> int:
    """That the run has behind it, as the callback counts them that rolls back."""
    told = [one.summary() for one in trainer.callbacks if hasattr(one, "summary")]  # type: ignore[attr-defined]
    return sum(int(summary.get("rollbacks", 0)) for summary in told)


def _checkpoint_io(run: Run) -> FolderCheckpointIO:
    io = run.trainer.strategy.checkpoint_io
    assert isinstance(io, FolderCheckpointIO), "build gives every strategy one"
    return io


def _log_event(run: Run, event: str, step: int, **fields: Any) -> None:
    """Where training has begun: a resume that fails leaves the run it meant as it was."""
    [began] = [one for one in run.trainer.callbacks if isinstance(one, RunStartCallback)]  # type: ignore[attr-defined]
    if run.checkpoint is not None and not began.has_begun:
        return
    for logger in run.trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields)


def _last_line(summary: dict[str, Any], folder: Path) -> str:
    parts = [f"{summary['steps']} steps"]
    parts += [
        f"{name.replace('_', ' ')} {summary[name]:.4f}"
        for name in ("train_loss", "val_loss")
        if summary[name] is not None
    ]
    if summary.get("tokens_per_second") is not None:
        parts.append(f"{summary['tokens_per_second']:,.0f} tokens/s")
    return f"Finished: {', '.join(parts)}, in {folder}"
