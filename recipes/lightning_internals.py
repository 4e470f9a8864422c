"""Every private attribute of Lightning that `recipes` reads or sets, one function each; checked with Lightning 2.6.6.

Methods of Lightning that a subclass must override under a private name stay in that subclass
(`recipes.strategy.precision_plugin.ZeroPrecision`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer


def disable_signal_handling(trainer: lightning.Trainer) -> None:
    """Leave signals to `recipes.runtime.signals`.

    Before every micro-batch Lightning broadcasts from rank 0 whether a signal has arrived, and waits for it (#21487,
    2.6.6). On SIGTERM it broadcasts inside the handler (2.6.6), which fails wherever the handler interrupts once a
    peer is dead.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def skip_empty_hooks(trainer: lightning.Trainer) -> None:
    """Let the Trainer pass over the hooks that a callback does not have, half a millisecond a step with twelve of them.

    Lightning 2.6.6 calls every hook of every callback, each within a span of its profiler, unless it is not callable.
    """
    names = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
    names += ["on_before_optimizer_step", "on_train_batch_end"]  # Lightning asks of no other whether it is callable
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in names:
            if getattr(type(callback), name) is getattr(Callback, name) and name not in vars(callback):
                setattr(callback, name, None)


def is_accumulating(trainer: lightning.Trainer) -> bool:
    """Return whether the optimizer does not step after the micro-batch under way (2.6.6)."""
    return trainer.fit_loop._should_accumulate()


def align_row_step(trainer: lightning.Trainer) -> None:
    """Make the step of the next logged row follow `global_step`.

    Lightning 2.6 numbers rows by a counter of its own, which some resumes leave one behind.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def skip_backward(trainer: lightning.Trainer) -> None:
    """Leave zeroing gradients and the backward pass to the training step (2.6.6 has this for averaging weights)."""
    trainer.fit_loop._skip_backward = True


def validate_now(trainer: lightning.Trainer) -> None:
    """Validate at the step just restored, before the next one; its metrics go into the row of that step.

    Lightning 2.6 has no public way to validate inside `fit` outside the schedule.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    # the counter that numbers rows is one behind while a step is validated
    epoch_loop._batches_that_stepped = trainer.global_step - 1
    epoch_loop.val_loop.restarting = False
    trainer.validating = True
    epoch_loop.val_loop.run()
    trainer.training = True
    align_row_step(trainer)


def skip_validation_once(trainer: lightning.Trainer, *, step: int) -> None:
    """Return to a step inside `fit` without validating it again (2.6.6).

    Args:
        trainer: Its `global_step` is restored.
        step: Optimizer steps completed after a rollback; the next logged row counts from it.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop._batches_that_stepped = step
    epoch_loop._skip_next_val = True


def set_up_mesh(
    strategy: ModelParallelStrategy, connect: Callable[[], None], get_shape: Callable[[], dict[str, int]]
) -> None:
    """Join the process group and give a strategy its device mesh.

    `ModelParallelStrategy.setup_environment` (2.6.6) does both, but always lays out a mesh for tensor parallelism.

    Args:
        strategy: Its `device_mesh` is set.
        connect: Called once the ranks have joined.
        get_shape: Returns the ranks along each named axis; called after that.
    """
    strategy._setup_distributed()
    connect()
    shape = get_shape()
    strategy._device_mesh = init_device_mesh(
        strategy.root_device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)
    )


def join_deepspeed_process_group(strategy: DeepSpeedStrategy) -> None:
    """Join the process group through DeepSpeed (2.6.6: only `setup_distributed` calls it)."""
    strategy.set_world_ranks()
    strategy._init_deepspeed_distributed()


def complete_deepspeed_config(strategy: DeepSpeedStrategy) -> None:
    """Add batch size and precision to DeepSpeed's config before `zero.Init` reads it (2.6.6)."""
    strategy._init_config_if_needed()


@contextmanager
def state_left_on_device(strategy: Strategy) -> Iterator[None]:
    """Make `Strategy.teardown` leave weights and optimizer state where they are.

    Lightning 2.6.6 copies both to pageable host memory on every rank, also after an error: 12 bytes a parameter and
    replica, which all processes of a node need at once, for a process that is about to end.
    """
    optimizers, strategy.optimizers = strategy.optimizers, []
    module: Any = strategy.lightning_module
    if module is not None:
        module.cpu = lambda: module  # hides the method of its class
    try:
        yield
    finally:
        strategy.optimizers = optimizers
        if module is not None:
            del module.cpu


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside Lightning's wrapper, or the one given.

    `LightningOptimizer` (2.6.6) hands reads through but keeps what is set on it to itself.
    """
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
