"""What a task adds to a checkpoint and restores from it: counters, parameter names, random state, hyperparameters."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from recipes.checkpoint.layout import shard_name
from recipes.checkpoint.rng_state import restore, rng_state, seed_rank
from recipes.checkpoint.shard_file import write_shard
from recipes.clipping import Clipping
from recipes.lightning_internals import skip_validation_once
from recipes.mesh import Mesh
from recipes.model.init import unsharded_shape
from recipes.model.weights.adapter import has_adapter
from recipes.numerics.collectives import gather_objects
from recipes.numerics.ema import NAME as AVERAGE
from recipes.numerics.nf4 import list_nf4
from recipes.task.resumed import check_base, check_model, check_optimizer, recount_micro_batches


class Resumable(lightning.LightningModule):
    """A task that resumes from a checkpoint of any strategy, on any number of ranks.

    Args:
        seed: Of each rank's random state.
        clipping: Its history is part of the train state.
        keeps_average: The optimizer state holds an average of the weights.

    Attributes:
        seed: Of the first weights and of each rank's random state.
        optimized_parameters: Names of the parameters in the optimizer's groups, in its order; one that two groups have
            is there twice.
        num_samples: Samples consumed so far over all ranks; a host integer.
        num_tokens: Tokens consumed so far over all ranks; a host integer.
        awaits_checkpoint: Whether a checkpoint's weights are to follow, so that no first ones are drawn.
    """

    awaits_checkpoint = False

    def __init__(self, *, seed: int, clipping: Clipping, keeps_average: bool) -> None:
        super().__init__()
        self.clipping = clipping
        self._keeps_average = keeps_average
        self.num_samples = 0
        self.num_tokens = 0
        self.seed = seed
        self._optimizer: str | None = None
        self.optimized_parameters: list[str] = []
        self._every_parameter: list[str] = []
        self._hyperparameters: list[dict[str, Any]] = []
        self._resumed_optimizer: str | None = None
        self._resumed_rng: list[Any] | None = None
        self._rng_is_restored = False

    def recipes_consumed(self) -> tuple[int, int]:
        """Return samples and tokens consumed so far over all ranks, for callbacks."""
        return self.num_samples, self.num_tokens

    # The optimizer of a run: remembered when it is built, set up when training starts.

    def remember_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the optimizer's class and the names of its parameters, before an engine wraps or shards them.

        Raises:
            ConfigError: The checkpoint holds the state of another optimizer.
        """
        self._optimizer = getattr(optimizer, "state_of", type(optimizer).__name__)
        check_optimizer(self._optimizer, self._resumed_optimizer)
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        self.optimized_parameters = [
            names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
        ]
        tied = self._tied
        self._every_parameter = self._gather_names([name for name in self.optimized_parameters if name not in tied])

    def _gather_names(self, own: list[str]) -> list[str]:
        """Return the names of all ranks that have other layers, each once, those of the first layers first."""
        group = self.trainer.strategy.groups.pipeline  # type: ignore[attr-defined]
        if group is None:
            return own
        return list(dict.fromkeys(name for of_rank in gather_objects(own, group) for name in of_rank))

    def remember_hyperparameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the hyperparameters of the config, which a loaded checkpoint overwrites with its own."""
        self._hyperparameters = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def resume_optimizer(self, schedule: Callable[[int], float]) -> None:
        """Set hyperparameters and learning rates from the config, keeping the optimizer state of the checkpoint.

        Args:
            schedule: Optimizer step, from 0 -> multiplier of the peak learning rate.
        """
        optimizer, scheduler = self.trainer.optimizers[0], self.lr_schedulers()
        assert isinstance(scheduler, LambdaLR), "configure_optimizers returns one LambdaLR"
        for group, configured in zip(optimizer.param_groups, self._hyperparameters, strict=True):
            group |= configured | {"initial_lr": configured["lr"]}
            group["lr"] = configured["lr"] * schedule(scheduler.last_epoch)
        scheduler.base_lrs = [configured["lr"] for configured in self._hyperparameters]
        self.restore_rng()

    def restore_rng(self) -> None:
        """Restore the random state of the checkpoint, once; without a checkpoint, seed this rank.

        Whatever runs before may draw random numbers; whatever runs after must draw the same ones as without a resume.
        """
        if self._rng_is_restored:
            return
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        step = self.trainer.global_step
        if self._resumed_rng is None:
            seed_rank(seed=self.seed, rank=rank, step=step)
        else:
            restore(self._resumed_rng, seed=self.seed, rank=rank, world_size=world_size, step=step)
        self._rng_is_restored = True
        self._resumed_rng = None  # a reference would keep the checkpoint's files open

    # Checkpoints.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["consumed"] = {"samples": self.num_samples, "tokens": self.num_tokens}
        checkpoint["strategy"] = type(self.trainer.strategy).__name__
        checkpoint["model_ranks"] = self._model_ranks
        checkpoint["loggers"] = {type(logger).__name__: logger.version for logger in self.trainer.loggers}
        checkpoint["optimizer"] = self._optimizer
        checkpoint["parameters"] = self.optimized_parameters
        checkpoint["every_parameter"] = self._every_parameter
        checkpoint["base"] = self._base_of_adapter
        frozen = self.frozen_names()
        for name in frozen:
            checkpoint["state_dict"].pop(name, None)  # of this rank's shards
        checkpoint["tied"] = {name: first for name, first in self._tied.items() if name not in frozen}
        checkpoint["rng"] = rng_state()
        checkpoint["clipping"] = self.recipes_live_scalars()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        tensors = self.state_dict(keep_vars=True)
        frozen = self.frozen_names()
        shapes = {name: unsharded_shape(tensor) for name, tensor in tensors.items() if name not in frozen}
        if self.whole_model is not None:  # the layers of the other ranks, too
            shapes = {f"model.{name}": tensor.shape for name, tensor in self.whole_model.state_dict().items()}
        check_model(shapes, checkpoint["state_dict"])
        check_base(self._base_of_adapter, checkpoint.get("base"))  # absent from files of earlier versions
        self.awaits_checkpoint = False
        self.num_samples = checkpoint["consumed"]["samples"]
        self.num_tokens = checkpoint["consumed"]["tokens"]
        for logger in self.trainer.loggers:
            if hasattr(logger, "on_load_checkpoint"):
                logger.on_load_checkpoint(self.trainer, self, checkpoint)
        self._resumed_optimizer = checkpoint["optimizer"]
        if self._optimizer is not None:  # some engines load after the optimizer is built
            check_optimizer(self._optimizer, self._resumed_optimizer)
        # as many ranks that divide the work in another way are other ranks; absent from files of earlier versions
        is_same_mesh = checkpoint.get("model_ranks", {}) == self._model_ranks
        self._resumed_rng = checkpoint["rng"] if is_same_mesh else []
        self.recipes_restore_scalars(checkpoint.get("clipping", {}))  # absent from files of earlier versions
        if not self._keeps_average:
            for state in checkpoint["optimizer_states"][0]["state"].values():
                state.pop(AVERAGE, None)
        recount_micro_batches(checkpoint, self.trainer.accumulate_grad_batches)

    def recipes_save_weights(self, folder: Path) -> None:
        """Write this rank's part of the weights alone, in the file format of a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        shards = self.trainer.strategy.lightning_module_state_dict()
        left_out = {*self._tied, *self.frozen_names()}
        on_host = {
            name: replace(shard, tensor=shard.tensor.cpu()) for name, shard in shards.items() if name not in left_out
        }
        path = folder / shard_name(self.trainer.global_rank)
        path.unlink(missing_ok=True)
        write_shard(path, on_host)

    @property
    def _model_ranks(self) -> dict[str, int]:
        """How many ranks divide sequences, and how many matrices; those of one are left out."""
        mesh: Mesh = self.trainer.strategy.mesh  # type: ignore[attr-defined]
        return {name: size for name, size in mesh.sizes().items() if name not in ("replicate", "shard")}

    @functools.cached_property
    def whole_model(self) -> nn.Module | None:
        """The model with the layers of all ranks, without storage; None where this rank has all of them."""
        if self.trainer.strategy.groups.pipeline is None:  # type: ignore[attr-defined]
            return None
        whole: nn.Module = self.meta_model()  # type: ignore[operator]
        return whole

    @property
    def _tied(self) -> dict[str, str]:
        """Every further name of a tied parameter -> its first name, also of one that another rank has."""
        first: dict[int, str] = {}
        every = list(self.named_parameters(remove_duplicate=False))
        if self.whole_model is not None:
            every = [(f"model.{name}", p) for name, p in self.whole_model.named_parameters(remove_duplicate=False)]
        return {
            name: first[id(parameter)] for name, parameter in every if first.setdefault(id(parameter), name) != name
        }

    def frozen_names(self) -> frozenset[str]:
        """Return the parameters that a checkpoint leaves out: beside an adapter, all that are not trained."""
        if self._base_of_adapter is None:
            return frozenset()
        every = self.named_parameters(remove_duplicate=False)
        return frozenset(name for name, parameter in every if not parameter.requires_grad)

    @property
    def _base_of_adapter(self) -> str | None:
        """What the weights beside an adapter are: a published model, or drawn from a seed. None without an adapter."""
        model: Any = self.model
        if not has_adapter(model):
            return None
        base = str(getattr(model, "pretrained", None) or f"seed {self.seed}")
        return f"{base} in NF4" if any(list_nf4(model)) else base

    # Rollbacks.

    def recipes_live_scalars(self) -> dict[str, Any]:
        """Return what a rollback restores in addition to tensors: the clipping history, by the name of its class."""
        return {type(self.clipping).__name__: self.clipping.state_dict()}

    def recipes_restore_scalars(self, scalars: dict[str, Any]) -> None:
        """Restore what `recipes_live_scalars` returned; the history of another kind of clipping is ignored."""
        history = scalars.get(type(self.clipping).__name__)
        if history is not None:
            self.clipping.load_state_dict(history)

    def on_rollback(self, trainer: lightning.Trainer, pl_module: Any, from_step: int, to_step: int) -> None:
        """Set back Lightning's counters of micro-batches; the data stream has its own position and moves on.

        Args:
            trainer: Lightning's.
            pl_module: This task.
            from_step: Optimizer step at which the spike was found.
            to_step: Optimizer step whose state has been restored.
        """
        loop = trainer.fit_loop.epoch_loop
        done = to_step * trainer.accumulate_grad_batches
        for counts in (loop.batch_progress.total, loop.batch_progress.current):
            vars(counts).update(dict.fromkeys(vars(counts), done))
            counts.completed = done - 1  # the current micro-batch is counted when it ends
        skip_validation_once(trainer, step=to_step)  # it has been validated already, if at all
        if from_step == trainer.max_steps:
            trainer.should_stop = False  # the run was about to end, and has steps to repeat now
