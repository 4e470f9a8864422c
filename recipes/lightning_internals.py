"""All access to private or untyped Lightning attributes, one function each; checked with Lightning 2.6.6.

Overrides of private Lightning methods stay in the subclass that needs them
(`recipes.strategy.precision_plugin.ZeroPrecision`).
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import CombinedLoader, rank_zero_only
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from recipes.errors import ConfigError

# Attributes that Lightning sets from its connectors, so that its type annotations do not have them.


def get_callbacks(trainer: lightning.Trainer) -> list[Callback]:
    """Return the callbacks of a Trainer, the list itself, which may be changed."""
    untyped: Any = trainer
    callbacks: list[Callback] = untyped.callbacks
    return callbacks


def get_data(trainer: lightning.Trainer) -> Any:
    """Return the data module of a Trainer, which may be a user's; None without one."""
    return getattr(trainer, "datamodule", None)


def get_log_interval(trainer: lightning.Trainer) -> int:
    """Return after how many optimizer steps a row is logged."""
    untyped: Any = trainer
    interval: int = untyped.log_every_n_steps
    return interval


def set_rank(rank: int) -> None:
    """Set the rank that Lightning's `rank_zero_only` compares with zero; it reads the environment when imported."""
    untyped: Any = rank_zero_only
    untyped.rank = rank


def sync_every_micro_batch(trainer: lightning.Trainer) -> None:
    """Reduce gradients over ranks after every micro-batch, which Lightning suppresses until the last one of a step."""
    untyped: Any = trainer.strategy
    untyped.block_backward_sync = contextlib.nullcontext


# Private attributes.


def disable_signal_handling(trainer: lightning.Trainer) -> None:
    """Leave signals to `recipes.runtime.signals`.

    Before every micro-batch, Lightning runs a blocking broadcast from rank 0 of whether a signal has arrived (#21487,
    2.6.6). On SIGTERM it broadcasts inside the handler (2.6.6), which fails once a peer is dead.
    """
    connector: Any = trainer._signal_connector
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    connector.register_signal_handlers = epoch_loop._broadcast_sigterm_tensor = lambda: None


def skip_empty_hooks(trainer: lightning.Trainer) -> None:
    """Make the Trainer skip hooks that a callback does not override: saves 0.5 ms a step with twelve callbacks.

    Lightning 2.6.6 calls every callable hook of every callback, each in a profiler span.
    """
    names = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
    names += ["on_before_optimizer_step", "on_train_batch_end"]  # Lightning checks no other hook for being callable
    for callback in get_callbacks(trainer):
        for name in names:
            if getattr(type(callback), name) is getattr(Callback, name) and name not in vars(callback):
                setattr(callback, name, None)


def is_accumulating(trainer: lightning.Trainer) -> bool:
    """Return whether the current micro-batch only accumulates gradients, without an optimizer step (2.6.6)."""
    return trainer.fit_loop._should_accumulate()


def is_ending(trainer: lightning.Trainer) -> bool:
    """Return whether the run ends after the current step: below `min_steps`, `should_stop` has no effect (2.6.6)."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def get_training_loader(trainer: lightning.Trainer) -> Any:
    """Return the training loaders as Lightning combines them (2.6.6)."""
    return trainer.fit_loop._combined_loader


def end_after_epochs(trainer: lightning.Trainer, num_epochs: int, count_steps: Callable[[], int]) -> None:
    """Set the length of a run once its loaders are there (2.6.6).

    Args:
        trainer: Before `fit`.
        num_epochs: Epochs begun, which the module reads as `trainer.max_epochs`.
        count_steps: Returns the optimizer steps.
    """
    loop: Any = trainer.fit_loop
    load = loop.setup_data

    def load_and_count() -> None:
        load()
        loop.epoch_loop.max_steps = count_steps()

    loop.max_epochs, loop.setup_data = num_epochs, load_and_count


def begin_epoch(trainer: lightning.Trainer, epoch: int) -> None:
    """Begin an epoch of the training loaders, which Lightning does itself except after a resume (2.6.6)."""
    loop: Any = trainer.fit_loop
    for loader in loop._combined_loader.flattened:
        _set_sampler_epoch(loader, epoch)
    iter(loop._data_fetcher)


def read_again(trainer: lightning.Trainer, num_batches: int) -> None:
    """Read batches of the epoch that a checkpoint has counted (2.6.6)."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    for _ in range(num_batches):
        next(fetcher)
    fetcher.fetched -= num_batches  # Lightning adds those of the checkpoint to what the fetcher has read


def forget_arguments(loaders: Any) -> None:
    """Let Lightning make loaders anew from their attributes, as it does to predict, and not from their arguments.

    It adds the batch size to the arguments that it has kept, and fails if that was given by position (2.6.6).
    """
    for loader in CombinedLoader(loaders, "sequential").flattened:
        if type(loader) is DataLoader:
            vars(loader).pop("__pl_saved_args", None)  # in a hook, Lightning would repeat `delattr`


def collect_checkpoint(trainer: lightning.Trainer) -> dict[str, Any]:
    """Return what `save_checkpoint` would save now (2.6.6)."""
    untyped: Any = trainer
    checkpoint: dict[str, Any] = untyped._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def is_row_due(trainer: lightning.Trainer) -> bool:
    """Return whether a row is logged at the end of the current micro-batch (2.6.6)."""
    connector: Any = trainer._logger_connector
    return bool(connector.should_update_logs)


def validates_now(trainer: lightning.Trainer) -> bool:
    """Return whether a validation follows the current micro-batch (2.6.6)."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    return bool(epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)) and not epoch_loop._skip_next_val


def is_epoch_over(trainer: lightning.Trainer) -> bool:
    """Return whether the current micro-batch is the last one of an epoch of the training loaders (2.6.6)."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def validate_every(trainer: lightning.Trainer, *, steps: int, epochs: int | None) -> None:
    """Validate after every so many optimizer steps or epochs, and at the end of the run (2.6.6).

    Lightning counts micro-batches, and the last window of an epoch may have fewer of them than the others; in an epoch
    that is not due it does not validate, even if the run ends there.
    """
    loop: Any = trainer.fit_loop.epoch_loop

    def is_due(data_fetcher: object) -> bool:
        if not trainer.enable_validation or is_accumulating(trainer):
            return False
        if is_ending(trainer):
            return True
        if epochs is None:
            return trainer.global_step % steps == 0
        return is_epoch_over(trainer) and (trainer.current_epoch + 1) % epochs == 0

    loop._should_check_val_fx = is_due


def take_over_rows(trainer: lightning.Trainer, *, loss: str) -> None:
    """Keep Lightning from logging what is in the row of a step, or is of no step (2.6.6).

    It logs what a module logs in a step after all hooks of a batch, so a checkpoint would be ahead of its row; and what
    one logs in a batch of validation under the number of that batch. A mean over the epoch gets a name of its own.

    Args:
        trainer: Before `fit`.
        loss: Name of the loss of a step; a module may log the mean of the epoch by the same name.
    """
    connector: Any = trainer._logger_connector
    log = connector.log_metrics

    def log_of_epoch(metrics: dict[str, Any], step: int | None = None) -> None:
        renamed = {f"{loss}_epoch" if name == loss else name: value for name, value in metrics.items()}
        renamed.pop("step", None)  # by which a module may ask Lightning for another number
        log(renamed, trainer.fit_loop.epoch_loop._batches_that_stepped if step is None else step)

    def announce_row() -> None:
        """Let callbacks that follow the rows know of one that the loggers have already."""
        if connector.should_update_logs and not (automatic() and is_accumulating(trainer)):
            connector.log_metrics({})

    def automatic() -> bool:
        return trainer.lightning_module.automatic_optimization

    connector.update_train_step_metrics = announce_row
    connector.update_eval_step_metrics = lambda step: None
    connector.log_metrics = log_of_epoch


def list_validated(trainer: lightning.Trainer) -> set[str]:
    """Return the names that the validation which has just ended has logged, of all its loaders (2.6.6).

    What Lightning calls its metrics is then what was logged outside of the batches of a loader.
    """
    results: Any = trainer._results
    logged = [] if results is None else [item for item in results.values() if item.meta.on_epoch and not item.has_reset]
    return {name for item in logged for name in results._forked_name(item, False)}


def get_step_metrics(trainer: lightning.Trainer) -> dict[str, Any]:
    """Return what the module has logged in this micro-batch with `logger=True` and `on_step=True` (2.6.6)."""
    results: Any = trainer._results
    return {} if results is None else dict(results.metrics(True)["log"])


def get_monitored(trainer: lightning.Trainer) -> dict[str, float]:
    """Return the value of each metric that a ReduceLROnPlateau follows, if it has been logged (2.6.6)."""
    names = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    if not names:
        return {}
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    known = dict(trainer.callback_metrics)
    if epoch_loop._num_ready_batches_reached():
        known |= epoch_loop._results.metrics(False)["callback"]  # of the epoch, which Lightning computes at its end
    return {name: float(known[name]) for name in names if name in known}


def set_monitored(trainer: lightning.Trainer, values: Mapping[str, float]) -> None:
    """Set the last values of metrics, as `get_monitored` returned them, where nothing has logged them yet (2.6.6)."""
    connector: Any = trainer._logger_connector
    for name, value in values.items():
        connector._callback_metrics.setdefault(name, torch.tensor(value, dtype=torch.float64))


_OF_PLATEAU = re.compile(r"ReduceLROnPlateau conditioned on metric (\S+) which is not .* are: \[(.*?)\]")
_OF_EARLY_STOP = re.compile(
    r"Early stopping conditioned on metric `(\S+)` which is not .* following: `(.*?)`$", re.DOTALL
)


def explain_missing_metric(error: BaseException) -> ConfigError | None:
    """Return what to type where Lightning (2.6.6) lacks the metric that a schedule or EarlyStopping follows."""
    if found := _OF_PLATEAU.match(str(error)):
        setting, fix = "monitor of the ReduceLROnPlateau: ", "another monitor in configure_optimizers"
        fix = f"eval_every=1epochs for a metric of validation, or {fix}"
    elif found := _OF_EARLY_STOP.match(str(error)):
        setting, fix = "callbacks.early_stop.monitor=", "callbacks.early_stop.monitor=<one of these>"
    else:
        return None
    logged = " ".join(name.strip("'` ") for name in found[2].split(",")) or "nothing"
    mistake = ConfigError(f"{setting}{found[1]}", f"it has not been logged by now; logged so far: {logged}", fix)
    mistake.late = "The run has ended: it follows a metric that is not there."
    return mistake


def complete_batch(trainer: lightning.Trainer) -> bool:
    """Take the steps of each ReduceLROnPlateau that a resume leaves out, and begin the epoch that follows as a new one.

    Lightning takes these steps after the last hook of a batch and of an epoch, and a checkpoint is saved in a hook.
    After a resume it takes none until the end of the epoch, and it skips `on_train_epoch_start` of the epoch after a
    checkpoint of the last batch (2.6.6). Call this in `on_train_start`.

    Returns:
        Whether all metrics that such a step needs were known.
    """
    loop = trainer.fit_loop
    epoch_loop: Any = loop.epoch_loop
    if not epoch_loop.restarted_on_train_batch_end:
        return True  # saved after a validation: Lightning goes on from there
    ends = epoch_loop._num_ready_batches_reached()
    if ends:
        loop.reset_restart_stage()
    plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if any(config.monitor not in trainer.callback_metrics for config in plateaus):
        return False
    epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    if ends:
        progress = loop.epoch_progress.current
        progress.completed -= 1  # counts of schedulers are those of the epoch that ends
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        progress.completed += 1
    return True


def end_restart(trainer: lightning.Trainer) -> None:
    """Let the end of an epoch be like any other, though the run was resumed in it. Call it in `on_train_epoch_end`.

    Lightning 2.6.6 takes no step of a ReduceLROnPlateau there, since it does not save the metrics.
    """
    loop: Any = trainer.fit_loop
    loop._restarting = False


def is_validation_due(trainer: lightning.Trainer) -> bool:
    """Return whether a validation follows the current micro-batch even if the run goes on (2.6.6)."""
    stops, trainer.should_stop = trainer.should_stop, False
    try:
        return validates_now(trainer)
    finally:
        trainer.should_stop = stops


def is_at_last_step(trainer: lightning.Trainer) -> bool:
    """Return whether the steps of the run are done."""
    return trainer.global_step >= trainer.max_steps >= 0


def align_row_step(trainer: lightning.Trainer) -> None:
    """Set the step of the next logged row from `global_step`.

    Lightning 2.6 numbers rows with a separate counter, which can be one behind after a resume. Under manual
    optimization a batch may make several steps, and every n-th batch is logged.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    is_manual = not trainer.lightning_module.automatic_optimization
    epoch_loop._batches_that_stepped = epoch_loop.total_batch_idx if is_manual else trainer.global_step


def align_validation_step(trainer: lightning.Trainer) -> None:
    """Set the step of what a validation or the end of an epoch logs to that of the step before it."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step - 1


def skip_backward(trainer: lightning.Trainer) -> None:
    """Leave `zero_grad` and the backward pass to the training step (2.6.6 has this flag for weight averaging)."""
    trainer.fit_loop._skip_backward = True


def validate_now(trainer: lightning.Trainer) -> None:
    """Validate at the step just restored and add the metrics to the row of that step.

    Lightning 2.6 has no public way to validate inside `fit` outside the schedule.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    # during validation, the counter that numbers rows is one behind
    epoch_loop._batches_that_stepped = trainer.global_step - 1
    epoch_loop.val_loop.restarting = False
    trainer.validating = True
    epoch_loop.val_loop.run()
    trainer.training = True
    align_row_step(trainer)


def skip_validation_once(trainer: lightning.Trainer, *, step: int) -> None:
    """Continue `fit` from a rolled-back step without validating that step again (2.6.6).

    Args:
        trainer: Trainer whose `global_step` has been restored.
        step: Optimizer steps completed after a rollback; the next logged row counts from here.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop._batches_that_stepped = step
    epoch_loop._skip_next_val = True


def restore_within(trainer: lightning.Trainer, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Restore checkpoints within a context, which then sees what the state in them makes anybody raise (2.6.6).

    Lightning passes it to the model, the data, callbacks, loops, optimizers and schedulers in two of its methods.
    """
    connector = trainer._checkpoint_connector
    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        setattr(connector, name, _within(context, getattr(connector, name)))


def _within(context: Callable[[], AbstractContextManager[object]], call: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(call)
    def run(*arguments: Any, **options: Any) -> None:
        with context():
            call(*arguments, **options)

    return run


def set_up_mesh(
    strategy: ModelParallelStrategy, connect: Callable[[], None], get_shape: Callable[[], dict[str, int]]
) -> None:
    """Initialize the process group and set the device mesh of a strategy.

    `ModelParallelStrategy.setup_environment` (2.6.6) does both, but always creates a (data, tensor) parallel mesh.

    Args:
        strategy: Strategy whose `device_mesh` is set.
        connect: Called once the process group is initialized.
        get_shape: Returns the size of each named mesh dimension; called after `connect`.
    """
    strategy._setup_distributed()
    connect()
    shape = get_shape()
    strategy._device_mesh = init_device_mesh(
        strategy.root_device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)
    )


def join_deepspeed_process_group(strategy: DeepSpeedStrategy) -> None:
    """Initialize the process group through DeepSpeed (2.6.6: otherwise only `setup_distributed` does)."""
    strategy.set_world_ranks()
    strategy._init_deepspeed_distributed()


def complete_deepspeed_config(strategy: DeepSpeedStrategy) -> None:
    """Add batch size and precision to DeepSpeed's config before `zero.Init` reads it (2.6.6)."""
    strategy._init_config_if_needed()


@contextmanager
def state_left_on_device(strategy: Strategy) -> Iterator[None]:
    """Make `Strategy.teardown` leave weights and optimizer state on the device.

    Lightning 2.6.6 copies both to pageable host memory on every rank, even after an error: 12 bytes per parameter and
    replica, in all processes of a node at once, just before they exit.
    """
    optimizers, strategy.optimizers = strategy.optimizers, []
    module: Any = strategy.lightning_module
    if module is not None:
        module.cpu = lambda: module  # shadows the method of the class
    try:
        yield
    finally:
        strategy.optimizers = optimizers
        if module is not None:
            del module.cpu


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside Lightning's wrapper, or `optimizer` itself if it is not wrapped.

    `LightningOptimizer` (2.6.6) forwards attribute reads to the optimizer, but not writes.
    """
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
