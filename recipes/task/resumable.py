"""What a task adds to a checkpoint and takes from one: counters, names, random numbers, the optimizer's identity."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from torch.optim.lr_scheduler import LambdaLR

from recipes.checkpoint.layout import shard_name
from recipes.checkpoint.rng_state import restore, rng_state, seed_rank
from recipes.checkpoint.shard_file import SavedTensor, write_shard
from recipes.clipping import Clipping
from recipes.errors import ConfigError
from recipes.lightning_internals import skip_validation_once
from recipes.model.init import unsharded_shape
from recipes.numerics.ema import NAME as AVERAGE


class Resumable(lightning.LightningModule):
    """A task that goes on from a checkpoint of any strategy, on any number of ranks.

    Args:
        seed: Of the draws of each rank.
        clipping: Whose history is part of the run.
        keeps_average: Whether the optimizer's state has an average of the weights.

    Attributes:
        num_samples, num_tokens: Consumed so far over all ranks; host integers.
    """

    def __init__(self, *, seed: int, clipping: Clipping, keeps_average: bool) -> None:
        super().__init__()
        self.clipping = clipping
        self._keeps_average = keeps_average
        self.num_samples = 0
        self.num_tokens = 0
        self._seed = seed
        self._optimizer: str | None = None
        self._parameters_in_order: list[str] = []
        self._hyperparameters: list[dict[str, Any]] = []
        self._resumed_optimizer: str | None = None
        self._resumed_rng: list[Any] | None = None
        self._draws_are_restored = False

    def remember_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which optimizer it is and the names of its parameters, before an engine takes it over.

        Raises:
            ConfigError: The checkpoint is of another one.
        """
        self._optimizer = type(optimizer).__name__
        refuse_other_optimizer(self._optimizer, self._resumed_optimizer)
        name_of = {id(parameter): name for name, parameter in self.named_parameters()}
        self._parameters_in_order = [
            name_of[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def remember_hyperparameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Those of the config: a checkpoint brings moments, not learning rates."""
        self._hyperparameters = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def go_on(self, schedule: Callable[[int], float]) -> None:
        """As training begins: moments come from the checkpoint, hyper-parameters and schedule from the config."""
        optimizer, scheduler = self.trainer.optimizers[0], self.lr_schedulers()
        assert isinstance(scheduler, LambdaLR), "configure_optimizers makes one schedule"
        for group, wanted in zip(optimizer.param_groups, self._hyperparameters, strict=True):
            group |= wanted | {"initial_lr": wanted["lr"]}
            group["lr"] = wanted["lr"] * schedule(scheduler.last_epoch)
        scheduler.base_lrs = [wanted["lr"] for wanted in self._hyperparameters]
        self.restore_draws()

    def restore_draws(self) -> None:
        """Random numbers go on from the checkpoint, once: what comes before may draw, what comes after must not."""
        if self._draws_are_restored:
            return
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        step = self.trainer.global_step
        if self._resumed_rng is None:
            seed_rank(seed=self._seed, rank=rank, step=step)
        else:
            restore(self._resumed_rng, seed=self._seed, rank=rank, world_size=world_size, step=step)
        self._draws_are_restored = True
        self._resumed_rng = None  # it keeps the checkpoint's files open

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["consumed"] = {"samples": self.num_samples, "tokens": self.num_tokens}
        checkpoint["strategy"] = type(self.trainer.strategy).__name__
        checkpoint["loggers"] = {type(one).__name__: one.version for one in self.trainer.loggers}
        checkpoint["optimizer"] = self._optimizer
        checkpoint["parameters"] = self._parameters_in_order
        checkpoint["tied"] = self._tied()
        checkpoint["rng"] = rng_state()
        checkpoint["clipping"] = self.live_scalars()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = self.state_dict(keep_vars=True)
        refuse_other_model(
            {name: unsharded_shape(tensor) for name, tensor in own.items()},
            checkpoint["state_dict"],
        )
        self.num_samples = checkpoint["consumed"]["samples"]
        self.num_tokens = checkpoint["consumed"]["tokens"]
        for logger in self.trainer.loggers:
            if hasattr(logger, "on_load_checkpoint"):
                logger.on_load_checkpoint(self.trainer, self, checkpoint)
        self._resumed_optimizer = checkpoint["optimizer"]
        if self._optimizer is not None:  # engines that restore after they have started
            refuse_other_optimizer(self._optimizer, self._resumed_optimizer)
        self._resumed_rng = checkpoint["rng"]
        self.restore_scalars(
            checkpoint.get("clipping", {})
        )  # none in the files of earlier versions
        if not self._keeps_average:
            for of_parameter in checkpoint["optimizer_states"][0]["state"].values():
                of_parameter.pop(AVERAGE, None)
        recount_micro_batches(checkpoint, passes=self.trainer.accumulate_grad_batches)

    def live_scalars(self) -> dict[str, Any]:
        """What a rollback puts back beside tensors: the history of the clipping, by the name of its class."""
        return {type(self.clipping).__name__: self.clipping.state_dict()}

    def restore_scalars(self, numbers: dict[str, Any]) -> None:
        """As `live_scalars` found them; that of another kind of clipping is left alone."""
        history = numbers.get(type(self.clipping).__name__)
        if history is not None:
            self.clipping.load_state_dict(history)

    def on_rollback(
        self, trainer: lightning.Trainer, pl_module: Any, from_step: int, to_step: int
    ) -> None:
        """Lightning counts micro-batches beside optimizer steps; the data, whose position is another count, goes on."""
        loop = trainer.fit_loop.epoch_loop
        done = to_step * trainer.accumulate_grad_batches
        for counts in (loop.batch_progress.total, loop.batch_progress.current):
            vars(counts).update(dict.fromkeys(vars(counts), done))
            counts.completed = done - 1  # the batch under way is counted when it ends
        skip_validation_once(trainer, step=to_step)
        if from_step == trainer.max_steps:
            trainer.should_stop = False  # the last step is not the last one after all

    def save_weights(self, folder: Path) -> None:
        """The weights alone, this rank's parts of them, in the files of a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        parts = self.trainer.strategy.lightning_module_state_dict()
        tied = self._tied()
        kept = {name: part for name, part in parts.items() if name not in tied}
        on_host = {name: replace(part, tensor=part.tensor.cpu()) for name, part in kept.items()}
        path = folder / shard_name(self.trainer.global_rank)
        path.unlink(missing_ok=True)
        write_shard(path, on_host)

    def _tied(self) -> dict[str, str]:
        """Names that stand for a parameter with another name."""
        first: dict[int, str] = {}
        every = self.named_parameters(remove_duplicate=False)
        return {
            name: first[id(parameter)]
            for name, parameter in every
            if first.setdefault(id(parameter), name) != name
        }


def refuse_other_model(own: Mapping[str, torch.Size], saved: Mapping[str, SavedTensor]) -> None:
    """Compare the shapes of a model's tensors with the tensors of a checkpoint.

    Raises:
        ConfigError: One is missing, one too many, or one has another shape.
    """
    here = {name: tuple(shape) for name, shape in own.items()}
    there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in here | there:
        if here.get(name) != there.get(name):
            raise ConfigError(
                "resume=… model.…",
                f"the checkpoint is of another model: {name} is {_shape(there.get(name))} there"
                f" and {_shape(here.get(name))} here",
                "resume=… without settings of the model",
            )


def refuse_other_optimizer(name: str, saved_name: str | None) -> None:
    """Moments of one optimizer mean nothing to another.

    Args:
        name: Class of the optimizer of this run.
        saved_name: That of the checkpoint; None where there is none.

    Raises:
        ConfigError: They differ.
    """
    if saved_name not in (None, name):
        raise ConfigError(
            f"optimizer={name.lower()}",
            f"the checkpoint holds the state of {saved_name}",
            f"optimizer={str(saved_name).lower()}, or leave it out",
        )


def recount_micro_batches(checkpoint: dict[str, Any], *, passes: int) -> None:
    """Rewrite Lightning's counters, in micro-batches, for a run with another number of them per step.

    Args:
        checkpoint: Lightning's, changed in place.
        passes: Micro-batches per optimizer step of this run.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = checkpoint["global_step"] * passes
    for counts in (progress["total"], progress["current"]):
        # 1 in a checkpoint written before its batch was counted as completed, else 0
        uncounted = counts["ready"] - counts["completed"]
        counts |= dict.fromkeys(counts, done) | {"completed": done - uncounted}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
