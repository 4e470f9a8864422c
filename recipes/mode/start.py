"""Start of a fit: writes files and prints the header once everything is built and restored. One broadcast."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from recipes.adapter.nf4_base import describe_base
from recipes.build import Run
from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.config.commands import list_classes, start_program
from recipes.config.own_code import OWN_CODE
from recipes.config.search_path import select_search_path
from recipes.data.datamodule import StreamDataModule
from recipes.engine import get_engine
from recipes.errors import ConfigError
from recipes.files import describe, write_atomically
from recipes.lightning_internals import get_callbacks
from recipes.logger.csv import CsvLogger
from recipes.model.init import unsharded_shape
from recipes.model.norm import describe_ghosts
from recipes.optimizer.rules import format_rows
from recipes.run_folder import (
    CHECKPOINTS,
    ENVIRONMENT_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    OOM_FOLDER,
    TOKENIZER_FOLDER,
)
from recipes.runtime import status
from recipes.runtime.console import LOGGER
from recipes.runtime.environment import describe_environment


class RunStartCallback(Callback):
    """Writes the config and logs the header once everything is built and all state is restored.

    Until then nothing in the run folder changes, so a failed resume leaves the run unchanged.

    Args:
        run: The run that starts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.has_begun = False

    @override
    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        """Check that all ranks resume from the same checkpoint.

        Raises:
            RuntimeError: This rank found a different checkpoint than rank 0.
        """
        # a shared file system may briefly list different files on different nodes
        own = str(self._run.checkpoint)
        if (first := get_engine(trainer).broadcast(own)) != own:
            raise RuntimeError(
                f"resume=…: rank {trainer.global_rank} sees {own} as the newest checkpoint, rank 0 {first};"
                " start again, or resume=<one checkpoint>"
            )

    @override
    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Write the files without which the run could not be resumed.

        Raises:
            ConfigError: They cannot be written; those that were there are unchanged or complete.
        """
        if trainer.is_global_zero:
            try:
                self._write_files(trainer)
            except OSError as error:
                raise ConfigError(
                    f"hydra.run.dir={self._run.folder}",
                    f"{error.filename} cannot be written: {describe(error)}",
                    "the same command once there is space, or hydra.run.dir=<a folder on another disk>",
                ) from error
        status.end()  # the progress bar follows
        self.has_begun = True
        if not trainer.is_global_zero:
            return
        if step := trainer.global_step:
            self._log_resume(step)
        else:
            source = next(iter(_list_sources(self._run)), None)
            log_event(self._run, "start", step, **({} if source is None else {"started_from": source["path"]}))
        for line in header(self._run, resumed_from=get_checkpoint_io(self._run).loaded):
            LOGGER.info(line)

    def _write_files(self, trainer: lightning.Trainer) -> None:
        run, step = self._run, trainer.global_step
        # of an earlier start any one may be missing, and the rows after its checkpoint are dropped all the same
        was_used = any((run.folder / name).exists() for name in (EVENTS_FILE, METRICS_FILE, CHECKPOINTS))
        run.freeze()
        for error_report in (run.folder / OOM_FOLDER).glob("rank_*.json"):
            error_report.unlink()  # left by an earlier start
        record = describe_environment(run.overrides) | {
            "program": start_program(run.overrides),
            "classes": list_classes(run.folder, select_search_path(run.overrides)),
            OWN_CODE: run.own_code,
            "tags": run.tags,
            "num_ranks": trainer.world_size,
            "started_from": [dict(each) for each in _list_sources(run)],
        }
        write_atomically(run.folder / ENVIRONMENT_FILE, json.dumps(record, indent=2) + "\n", fsync=True)
        tokenizer = run.data.source.tokenizer if isinstance(run.data, StreamDataModule) else None
        if tokenizer is not None:
            tokenizer.save(run.folder / TOKENIZER_FOLDER)
        for logger in trainer.loggers:
            if was_used and hasattr(logger, "resume_at"):
                logger.resume_at(step, num_rollbacks=_num_rollbacks(trainer))

    def _log_resume(self, step: int) -> None:
        run, io = self._run, get_checkpoint_io(self._run)
        for rejection in io.rejected:
            log_event(run, "checkpoint_rejected", step, path=rejection.path.name, why=rejection.why)
        assert io.loaded is not None, "a run that is past step 0 has loaded a checkpoint"
        # a kill between a checkpoint and its event leaves the checkpoint without one
        is_own = io.loaded.parents[1] == run.folder.resolve()
        [csv_logger] = [logger for logger in run.trainer.loggers if isinstance(logger, CsvLogger)]
        if is_own and not csv_logger.has_event("checkpoint", step):
            log_event(run, "checkpoint", step, path=io.loaded.name)
        log_event(run, "resume", step, path=io.loaded.name)


def _list_sources(run: Run) -> Sequence[Mapping[str, Any]]:
    """Return the runs that this one started from, newest first."""
    return () if run.has_own_training else run.task.started_from


def log_event(run: Run, event: str, step: int, **fields: Any) -> None:
    """Log an event to every logger that accepts events; a resume that failed before its first step logs none."""
    [start] = [callback for callback in get_callbacks(run.trainer) if isinstance(callback, RunStartCallback)]
    if run.checkpoint is not None and not start.has_begun:
        return
    for logger in run.trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields)


def get_checkpoint_io(run: Run) -> FolderCheckpointIO:
    """Return the reader and writer of this run's checkpoints."""
    io = get_engine(run.trainer).checkpoint_io
    assert isinstance(io, FolderCheckpointIO), "build gives every strategy one"
    return io


def _num_rollbacks(trainer: lightning.Trainer) -> int:
    """Return the number of rollbacks of the run so far, as reported by its callbacks."""
    summaries = [callback.summary() for callback in get_callbacks(trainer) if hasattr(callback, "summary")]
    return sum(int(summary.get("rollbacks", 0)) for summary in summaries)


def header(run: Run, *, resumed_from: Path | None) -> Iterator[str]:
    """Yield the lines printed before the first step: the model and its devices, the batch, the checkpoint.

    Args:
        run: The run, with its model built.
        resumed_from: Checkpoint it was restored from; None if it starts from scratch.
    """
    trainer = run.trainer
    setup = _describe_setup(run)
    yield from _describe_own(run, setup) if run.has_own_training else _describe_task(run, setup, resumed_from)
    device = run.task.device
    if run.precision.scales_loss and device.type == "cpu":
        yield "float16 is emulated on a CPU, about ten times slower than precision=bf16-mixed"
    if run.precision.name == "32-true" and device.type == "cpu" and torch.cpu.get_capabilities().get("amx_bf16"):
        yield "this processor has matrix units for bfloat16 (AMX), which precision=bf16-mixed uses"
    if resumed_from is not None:
        yield f"resumed from {resumed_from} at step {trainer.global_step}"
        if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            yield (
                "on a GPU the curve differs in its last bits from that of a run without interruption;"
                " trainer.deterministic=true makes them equal, with slower backward passes"
            )


def _describe_setup(run: Run) -> str:
    num_ranks, device = run.trainer.world_size, run.task.device
    devices = str(device) if num_ranks == 1 else f"{num_ranks} ranks of {device.type}{_describe_mesh(run.trainer)}"
    return f"{devices}, {run.precision.name}, {type(get_engine(run.trainer)).__name__}"


def _describe_own(run: Run, setup: str) -> Iterator[str]:
    """Yield what is known of a LightningModule of one's own, and what is not."""
    trainer, task = run.trainer, run.task
    weights = list(task.parameters())
    num_parameters = sum(unsharded_shape(weight).numel() for weight in weights)
    yield f"model: {type(task).__name__}, {num_parameters:,} parameters on {setup}"
    if untyped := _list_untyped(run):
        yield f"not typed, but of the recipe: {' '.join(untyped)}"
    if not task.automatic_optimization:
        yield "optimization: by the module; steps are those of all its optimizers, and spikes are not rolled back"
    if isinstance(run.data, StreamDataModule):
        size = run.accumulation.global_batch_size
        epochs = run.data.describe_epochs(trainer.max_steps * size)
        yield f"batch: {_count(size, 'sample')} per step, {epochs}"
        return
    num = trainer.num_training_batches
    loaders = "one's own loaders" if run.data is None else f"the loaders of {type(run.data).__name__}"
    length = _count(int(num), "batch", "batches") if num != float("inf") else "an unknown number of batches"
    epoch = f"{length} an epoch on each rank"
    yield f"batch: of {loaders}, {_count(trainer.accumulate_grad_batches, 'batch', 'batches')} a step; {epoch}"


def _list_untyped(run: Run) -> list[str]:
    """Return the settings of a recipe that decide how a module of one's own is trained, where nobody has typed them."""
    trainer = run.trainer
    ends_by_steps = trainer.max_epochs is None or trainer.max_epochs < 0
    known: dict[str, float] = {"trainer.max_steps": trainer.max_steps} if ends_by_steps else {}
    if trainer.gradient_clip_val is not None:
        known["trainer.gradient_clip_val"] = trainer.gradient_clip_val
    typed = [text.lstrip("+~").partition("=")[0] for text in run.overrides]
    return [f"{key}={value:.12g}" for key, value in known.items() if key not in typed]


def _describe_task(run: Run, setup: str, resumed_from: Path | None) -> Iterator[str]:
    trainer, plan = run.trainer, run.accumulation
    every = list((run.task.whole_model or run.task).parameters())
    num_parameters = sum(unsharded_shape(weight).numel() for weight in every)
    num_trained = sum(unsharded_shape(weight).numel() for weight in every if weight.requires_grad)
    trained = (
        ""
        if num_trained == num_parameters
        else f", {num_trained:,} of them trained ({num_trained / num_parameters:.2%}),"
    )
    num_idle = getattr(run.task.model, "num_idle_parameters", 0)
    active = f", {num_parameters - num_idle:,} active per token," if num_idle else ""
    yield f"model: {run.task.model_name}, {num_parameters:,} parameters{active}{trained} on {setup}"
    if resumed_from is None and run.task.first_weights is not None:
        yield from run.task.first_weights.describe()
    base = describe_base(run.task)
    if base is not None:
        yield f"base: {base}"
    if run.task.group_rows:
        yield from format_rows(run.task.group_rows)
    num_samples = trainer.max_steps * plan.global_batch_size
    steps, samples = _count(trainer.max_steps, "step"), _count(num_samples, "sample")
    num = max(plan.num_micro_batches, get_engine(trainer).num_micro_batches)
    micro_batches = "1 micro-batch" if num == 1 else f"{num} micro-batches"
    yield (
        f"batch: {_count(plan.global_batch_size, 'sample')} per step in {micro_batches}"
        f"{' per rank' if get_engine(trainer).data_size > 1 else ''};"
        f" {steps} {'is' if trainer.max_steps == 1 else 'are'} {samples}, {run.data.describe_epochs(num_samples)}"
    )
    ghosts = describe_ghosts(
        run.task.model,
        micro_batch_size=plan.global_batch_size // (num * get_engine(trainer).data_size),
        num_ranks=get_engine(trainer).data_size,
        global_batch_size=plan.global_batch_size,
    )
    if ghosts is not None:
        yield ghosts
    pipeline = get_engine(trainer).pipeline
    if pipeline is not None:
        yield f"pipeline: {pipeline.describe()}"


def _count(number: int, what: str, several: str | None = None) -> str:
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def _describe_mesh(trainer: lightning.Trainer) -> str:
    """Describe the mesh if it is not purely data-parallel."""
    mesh = get_engine(trainer).mesh
    if mesh.model_size == 1:
        return ""
    return f" ({', '.join(f'{name} {size}' for name, size in mesh.sizes().items())})"
