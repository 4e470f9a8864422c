"""Loaders of a LightningDataModule or LightningModule of one's own, and the place in an epoch that a run resumes at.

The order of such loaders follows from the generators of Python, numpy and torch when an epoch begins. A checkpoint has
their states at that moment and the number of batches read since: a resumed run begins the epoch again with them, and
reads these batches without training on them. Nothing but time is lost, whatever the loaders draw.
"""

import logging
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from recipes.checkpoint.rng_state import read_states, restore, rng_state
from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shard_file import Part
from recipes.checkpoint.shards import unsharded_part
from recipes.errors import ConfigError
from recipes.lightning_internals import begin_epoch, end_after_epochs, get_training_loader, read_again

LOGGER = logging.getLogger("lightning_recipes")
_EPOCH = "epoch_"  # before the source of a generator's state, of the beginning of the epoch
_NUM_READ = "epoch_batches"


def check_loaders(task: lightning.LightningModule, data: lightning.LightningDataModule | None) -> None:
    """Check that there are loaders to train on, and say so if there are none for a validation that is written.

    Args:
        task: The module.
        data: Its data module; None: it has the loaders itself.

    Raises:
        ConfigError: Neither has training loaders.
    """
    owner: Any = task if data is None else data
    name = type(owner).__name__
    if not is_overridden("train_dataloader", owner):
        setting = "data.module=null" if data is None else f"data.module._target_={name}"
        fix = "'data.module={_target_: <module.Class>}', or data=digits 'task.batch=[inputs, targets]' for data of ours"
        raise ConfigError(setting, f"{name} has no train_dataloader()", fix)
    validates, has_loaders = is_overridden("validation_step", task), is_overridden("val_dataloader", owner)
    if validates and not has_loaders:
        LOGGER.warning(f"No validation: {name} has no val_dataloader(), so no checkpoint is the best")
    elif has_loaders and not validates:
        LOGGER.warning(f"No validation: {type(task).__name__} has no validation_step(), so no checkpoint is the best")


def record_epochs(owner: Any) -> None:
    """Make the training loaders of a module or data module record the generators when an epoch begins."""
    of_user: Any = type(owner)
    owner.__class__ = type(of_user.__name__, (_Recording, of_user), {"__module__": of_user.__module__})


class _Recording:
    """The first base of a module whose training loaders are recorded."""

    def train_dataloader(self) -> CombinedLoader:
        """Return the loaders of the module as Lightning combines them."""
        loader = super().train_dataloader()  # type: ignore[misc]
        combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")
        combined.__class__ = RecordedLoader
        return combined


class RecordedLoader(CombinedLoader):
    """Loaders that keep the states of the generators with which the epoch began."""

    epoch_began: Mapping[str, Part] | None = None

    @override
    def __iter__(self) -> "RecordedLoader":
        self.epoch_began = rng_state()
        super().__iter__()
        return self


def end_after(trainer: lightning.Trainer, epochs: str) -> None:
    """Set the length of a run in epochs of its loaders, such as "3" or "1.5", once they are there."""

    def count_steps() -> int:
        setting = f"trainer.max_steps={epochs}epochs"
        if trainer.num_training_batches == math.inf:
            raise ConfigError(
                setting, "the loaders do not say how many batches they have", "trainer.max_steps=<optimizer steps>"
            )
        if not trainer.lightning_module.automatic_optimization:
            reason = "the module optimizes manually, and only it knows how many steps it makes in a batch"
            batches = f"{trainer.num_training_batches:,} batches of an epoch"
            raise ConfigError(setting, reason, f"trainer.max_steps=<{batches} x steps of a batch x {epochs}>")
        return math.ceil(Fraction(epochs) * _steps_per_epoch(trainer))

    end_after_epochs(trainer, math.ceil(Fraction(epochs)), count_steps)


def leave_room(trainer: lightning.Trainer) -> None:
    """Let a run in epochs begin another one if it cannot make its steps in those left: a rollback skips batches."""
    if trainer.max_epochs is None or trainer.max_epochs < 0:
        return
    done = math.ceil(trainer.fit_loop.epoch_loop.batch_progress.current.ready / trainer.accumulate_grad_batches)
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if epochs.processed == epochs.started:
        done = 0  # a resume has counted the epoch, and its batches are still there
    ahead = math.ceil((trainer.max_steps - trainer.global_step + done) / _steps_per_epoch(trainer))
    trainer.fit_loop.max_epochs = max(trainer.max_epochs, trainer.current_epoch + ahead)


def _steps_per_epoch(trainer: lightning.Trainer) -> int:
    return math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)


def get_place(trainer: lightning.Trainer) -> dict[str, Part]:
    """Return this rank's place in the epoch of loaders of one's own, for a checkpoint; empty for other data."""
    loader = get_training_loader(trainer)
    if not isinstance(loader, RecordedLoader) or loader.epoch_began is None:
        return {}
    num_read = torch.tensor(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
    place = {_EPOCH + source: state for source, state in loader.epoch_began.items()}
    return place | {_NUM_READ: unsharded_part(num_read)}


def go_on_in_epoch(trainer: lightning.Trainer, place: Mapping[str, SavedTensor] | None) -> None:
    """Move the loaders to where a checkpoint was saved; the generators must be in its states, and are left so.

    Args:
        trainer: About to train.
        place: What `get_place` returned, among the generator states of this rank; None: another number of ranks.
    """
    loop: Any = trainer.fit_loop
    loader = get_training_loader(trainer)
    if not isinstance(loader, RecordedLoader):
        return
    if any(hasattr(one, "load_state_dict") for one in loader.flattened):
        return  # it has gone on from its own state
    num_read = 0 if place is None else int(place[_NUM_READ].read())
    if place is None:
        LOGGER.warning("The loaders begin an epoch: the checkpoint was saved by another number of ranks")
        return
    if num_read >= trainer.num_training_batches:
        if loop.epoch_loop.restarted_on_train_batch_end:  # else Lightning ends the epoch first, and begins the next one
            begin_epoch(trainer, loop.epoch_progress.current.processed)
        return
    began = {source.removeprefix(_EPOCH): state for source, state in place.items() if source.startswith(_EPOCH)}
    del began[_NUM_READ.removeprefix(_EPOCH)]
    if num_read:
        LOGGER.info(f"data: reading {num_read:,} batches of the epoch again, to go on where the checkpoint was saved")
    with isolate_rng():
        restore(read_states([began], rank=0, world_size=1), seed=0, rank=0, step=0)
        begin_epoch(trainer, loop.epoch_progress.current.processed)
        read_again(trainer, num_read)
