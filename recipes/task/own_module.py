"""Train any LightningModule as it is, with the checkpoints, rows, ranks and rollbacks of a run.

Its steps, hooks, optimizers and schedules are its own. `adopt` gives the object a class of its own that is derived from
its class: nothing wraps it, so that names of parameters, `self.log` and everything else are what the author expects.
"""

import copy
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from recipes.after_module import AfterModule
from recipes.blocks import list_blocks
from recipes.checkpoint.layout import is_loadable
from recipes.checkpoint.rng_state import GeneratorStates, read_states, restore, rng_state
from recipes.compile import compile_blocks
from recipes.errors import ConfigError
from recipes.lightning_internals import (
    complete_batch,
    end_restart,
    get_callbacks,
    get_monitored,
    get_step_metrics,
    is_accumulating,
    is_at_last_step,
    is_row_due,
    is_validation_due,
    set_monitored,
    unwrap_optimizer,
)
from recipes.numerics.collectives import average_over_ranks
from recipes.precision import Precision
from recipes.task.own_loaders import get_place, go_on_in_epoch, leave_room
from recipes.task.resumable import OnEngine
from recipes.torch_internals import tree_leaves

LOGGER = logging.getLogger("lightning_recipes")
_LOSS = "train/loss"
# of an optimizer's groups: how torch computes a step on this run's device
_OF_DEVICE = ("params", "foreach", "fused", "capturable", "differentiable")


class OwnModule:
    """A LightningModule of one's own, constructed when the run is built.

    Args:
        module: Constructs it.
        blocks: Names of the classes of its blocks, the units of sharding and compilation; empty: those of its
            `named_blocks()` or `blocks`.
        batch: Keys of a batch of ours that the module is given as a tuple, such as [inputs, targets]; empty: the dict.
            A batch of its own loaders is left as it is.
        seed: Seed of the run.
        precision: Dtypes of weights and matrix products.
        compile_mode: `mode` of `torch.compile` for the blocks; None: eager.
    """

    has_own_training: ClassVar[bool] = True
    supports: ClassVar[frozenset[str]] = frozenset({"export"})
    deferred: ClassVar[tuple[str, ...]] = ("module",)

    def __init__(
        self,
        *,
        module: Callable[[], Any],
        blocks: Sequence[str],
        batch: Sequence[str],
        seed: int,
        precision: Precision,
        compile_mode: str | None,
    ) -> None:
        self._make = module
        self._of_run = _OfRun(
            seed=seed, blocks=tuple(blocks), batch=tuple(batch), precision=precision, compile_mode=compile_mode
        )

    def adopt(self) -> "Adopted":
        """Construct the module and give it what a run needs.

        Raises:
            ConfigError: It is no LightningModule, or its constructor raises.
        """
        module = self._make()
        if not isinstance(module, lightning.LightningModule):
            raise ConfigError(
                f"task.module._target_={type(module).__name__}",
                "it is not a LightningModule, which has the steps and optimizers of a training",
                "model={_target_: …} for an nn.Module, with task=classification or another of conf/task/",
            )
        of_user: Any = type(module)
        if removed := _list_removed(of_user):
            raise ConfigError(
                f"task.module._target_={of_user.__name__}",
                f"it is written for Lightning 1: Lightning 2 takes no {' and no '.join(removed)}",
                f"a class of yours derived from {of_user.__name__}, with the steps and hooks of Lightning 2",
            )
        bases = (_TakesTuples, Adopted, of_user) if self._of_run.batch else (Adopted, of_user)
        if self._of_run.batch:  # as it is meant
            warnings.filterwarnings("ignore", message="You have overridden `on_after_batch_transfer`")
        module.__class__ = type(of_user.__name__, bases, {"__module__": of_user.__module__})
        adopted: Any = module
        adopted.recipes_of_run = self._of_run
        adopted.recipes_row = {}
        adopted.optimized_parameters = []
        return adopted  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class _OfRun:
    """What a run keeps of a module of one's own: settings, and state between its hooks."""

    seed: int
    blocks: tuple[str, ...]
    batch: tuple[str, ...]
    precision: Precision
    compile_mode: str | None
    is_placed: bool = False
    num_samples: int = 0
    window_loss: Tensor | None = None  # 0-dim, of the micro-batches of a step so far
    num_in_window: int = 0  # micro-batches of a step so far
    rates: dict[str, float] = field(default_factory=dict)  # with which the newest step was made, by name
    step_loss: Tensor | None = None  # 0-dim, of the newest step on this rank
    is_object: dict[str, bool] = field(default_factory=dict)  # what the module adds to a checkpoint
    resumed_groups: list[dict[str, Any]] = field(default_factory=list)
    configured_groups: list[dict[str, float]] = field(
        default_factory=list
    )  # numbers of groups as the module makes them
    resumed_configured_groups: list[dict[str, float]] = field(default_factory=list)
    resumed_monitored: Mapping[str, float] = field(default_factory=dict)
    resumed_rng: GeneratorStates | None = None
    resumed_place: Mapping[str, Any] | None = None  # of loaders of one's own
    is_resumed: bool = False
    rng_before_end: dict[str, Any] | None = None  # of the generators, before a validation that only ends the run
    rng_before_validation: dict[str, Any] | None = None  # of the generators, before the newest one
    monitored_before_end: dict[str, float] = field(default_factory=dict)  # then, too
    is_rng_restored: bool = False


class Adopted(OnEngine):
    """The first base of a module that a run has adopted; every hook calls that of the module.

    Attributes:
        recipes_row: Metrics of the current step: what the module logs and what callbacks add.
        recipes_of_run: Settings of the run and state between hooks.
        optimized_parameters: Names of the parameters in the groups of all optimizers, in that order.
    """

    recipes_row: dict[str, float | Tensor]
    recipes_of_run: _OfRun
    optimized_parameters: list[str]
    # of `Resumable`, which engines and the start of a run read
    has_known_state: ClassVar[bool] = False
    recipes_calls_last: ClassVar[bool] = True  # see `AfterModule`

    # Model: placed once the ranks are known.

    @override
    def configure_model(self) -> None:
        of_run = self.recipes_of_run
        super().configure_model()
        if of_run.is_placed:
            return
        of_run.is_placed = True
        blocks = self._find_blocks()
        if of_run.compile_mode is not None and blocks:
            compile_blocks(blocks, mode=of_run.compile_mode, leaves_out_hooks=self.engine.gathers_by_hooks)
        place: Any = getattr(self.engine, "place_own", None)
        if place is not None:
            place(self, blocks)

    def _find_blocks(self) -> list[nn.Module]:
        names = self.recipes_of_run.blocks
        if not names:
            owners = (self, *self.children())
            return [block for owner in owners for block in list_blocks(owner)]
        known = {type(module).__name__ for module in self.modules()}
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"task.blocks=[{', '.join(names)}]",
                    f"no part of the module is a {name}; it has {', '.join(sorted(known - {type(self).__name__}))}",
                    "task.blocks=[<names of classes>]",
                )
        return [module for module in self.modules() if type(module).__name__ in names]

    # Steps: what a row and a rollback need of them.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        response: int | None = super().on_train_batch_start(batch, batch_idx)
        if response != -1:
            self.recipes_of_run.num_samples += _count_samples(batch) * self.engine.data_size
        return response

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        for callback in self._list_last():
            callback.end_batch(self.trainer, self, outputs)

    @override
    def on_validation_epoch_start(self) -> None:
        self.share_statistics()  # as before a save: what is measured is what a checkpoint would have
        super().on_validation_epoch_start()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        for callback in self._list_last():
            callback.end_validation(self.trainer, self)

    def _list_last(self) -> list[AfterModule]:
        return [callback for callback in get_callbacks(self.trainer) if isinstance(callback, AfterModule)]

    def recipes_add_step(self, outputs: Any) -> None:
        """Add to the row of a step, after its last micro-batch, the loss and what the module has logged in it.

        Args:
            outputs: What Lightning passes to `on_train_batch_end`; its loss is divided by the micro-batches.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        of_run, trainer = self.recipes_of_run, self.trainer
        if self.automatic_optimization and isinstance(loss, Tensor):
            earlier = of_run.window_loss
            of_run.window_loss = loss.detach() if earlier is None else earlier + loss.detach()
            of_run.num_in_window += 1
        if is_accumulating(trainer):
            return
        if is_at_last_step(trainer):
            trainer.should_stop = True  # makes Lightning log and validate the last step regardless of the intervals
        if is_validation_due(trainer):
            of_run.rng_before_validation = rng_state()
        elif trainer.should_stop:
            # its loaders draw from the same generators, and a run with more steps has no validation here
            of_run.rng_before_end, of_run.monitored_before_end = rng_state(), get_monitored(trainer)
        of_run.step_loss, of_run.window_loss = of_run.window_loss, None
        if of_run.step_loss is not None and of_run.num_in_window < trainer.accumulate_grad_batches:
            # the last window of an epoch: Lightning divides by the micro-batches of a whole one, as in the gradient
            of_run.step_loss = of_run.step_loss * (trainer.accumulate_grad_batches / of_run.num_in_window)
        of_run.num_in_window = 0
        if not is_row_due(trainer):
            return
        row = of_run.rates | get_step_metrics(trainer)
        if _LOSS in row:
            of_run.step_loss = None  # it logs one of its own
        self.recipes_row |= self._get_loss() | row

    def _get_loss(self) -> dict[str, float | Tensor]:
        """Return the loss of the newest step, averaged over the ranks; empty under manual optimization."""
        loss = self.recipes_of_run.step_loss
        return {} if loss is None else {_LOSS: self.engine.sum_over_data_ranks(loss.float()) / self.engine.data_size}

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.recipes_of_run.rates |= self._list_learning_rates(optimizer)

    def _list_learning_rates(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, float]]:
        """Yield the learning rate of an optimizer, and of each of its groups if they differ, by name."""
        name, known = "lr", [unwrap_optimizer(each) for each in self.trainer.optimizers]
        if len(known) > 1:
            name = f"lr/optimizer_{known.index(unwrap_optimizer(optimizer))}"
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        yield name, rates[0]
        if len({*rates}) > 1:
            for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
                yield f"{name}/{group.get('name', f'group_{number}')}", rate

    def recipes_log_last_step(self) -> None:
        """Log the loss of the last step, in whose place a module may have logged the mean of the epoch."""
        self.recipes_row |= self._get_loss()

    def recipes_consumed(self) -> tuple[int, int]:
        """Return the samples consumed so far over all ranks; tokens of a module of one's own are not known."""
        return self.recipes_of_run.num_samples, 0

    def recipes_generate_text(self, *prompt: Any, **options: Any) -> str | None:
        """Return None: a module of one's own generates no text that is known of."""
        return None

    def list_measures(self) -> dict[str, bool | None]:
        """Return the names of what validation has logged; whether higher is better is not known."""
        return {name: None for name in self.trainer.callback_metrics if name.startswith("val")}

    def share_statistics(self) -> None:
        """Average running statistics over ranks, because each rank has updated them with its own samples."""
        saved = self.state_dict(keep_vars=True)
        buffers = (buffer for name, buffer in self.named_buffers() if name in saved)
        average_over_ranks((buffer for buffer in buffers if buffer.is_floating_point()), self.engine.groups.stage)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Measure the gradient norm and clip in one pass, unless the module clips in its own way."""
        own = super().configure_gradient_clipping
        if getattr(own, "__func__", None) is not lightning.LightningModule.configure_gradient_clipping:
            own(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        by_value = gradient_clip_algorithm == "value"
        self.engine.clip_gradients(
            [parameter for group in optimizer.param_groups for parameter in group["params"]],
            max_norm=None if by_value else gradient_clip_val,
            max_value=gradient_clip_val if by_value else None,
        )

    # Optimizers and checkpoints.

    @override
    def toggle_optimizer(self, optimizer: Any) -> None:
        if getattr(self.engine, "shards_weights", False):
            raise ConfigError(
                f"task.module._target_={type(self).__name__}",
                "it freezes parameters by toggle_optimizer, and FSDP2 goes by their first forward pass",
                "strategy=ddp",
            )
        super().toggle_optimizer(optimizer)

    @override
    def configure_optimizers(self) -> Any:
        for callback in get_callbacks(self.trainer):  # the config check has read those of the command line
            if isinstance(callback, BaseFinetuning):
                raise ConfigError(
                    f"{type(callback).__name__} of configure_callbacks",
                    "it adds parameters to the optimizer during the run, which checkpoints do not follow",
                    "all parameters in the groups of configure_optimizers, and requires_grad in a hook of the module",
                )
        configured = super().configure_optimizers()
        optimizers = _list_optimizers(configured)
        if len(optimizers) > 1 and getattr(self.engine, "steps_one_optimizer", False):
            raise ConfigError(
                f"task.module._target_={type(self).__name__}",
                f"it has {len(optimizers)} optimizers, and DeepSpeed steps one",
                "strategy=ddp",
            )
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        groups = itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        optimized = [parameter for group in groups for parameter in group["params"]]
        if any(id(parameter) not in names for parameter in optimized):
            raise ConfigError(
                f"task.module._target_={type(self).__name__}",
                "its optimizer has tensors that are no parameters of the module, so no checkpoint would hold them",
                "nn.Parameter attributes of the module in their place",
            )
        # now, because an engine may put flat shards in the place of the parameters
        self.optimized_parameters = [names[id(parameter)] for parameter in optimized]
        for optimizer in optimizers:
            prepared = self.engine.prepare_optimizer(optimizer)
            assert prepared is optimizer, "the config check rejects an engine that replaces it"
        self.recipes_of_run.configured_groups = [
            {key: value for key, value in group.items() if type(value) in (int, float)}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        return configured

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        of_lightning = {*checkpoint}
        super().on_save_checkpoint(checkpoint)
        for key in [key for key in checkpoint if key.startswith(("hparams_", "hyper_parameters", "datamodule_hp"))]:
            del checkpoint[key]  # of `save_hyperparameters`: objects of any kind; config.yaml has the settings
        self._leave_out_objects(checkpoint, [key for key in checkpoint if key not in of_lightning])
        checkpoint["optimizer_states"] = [_join(checkpoint["optimizer_states"])]
        of_run, is_at_end = self.recipes_of_run, self.recipes_of_run.rng_before_end is not None
        # stopped in a validation, a run begins with it again
        before_validation = of_run.rng_before_validation if _is_validation_due(checkpoint) else None
        first: dict[int, str] = {}
        every = self.named_parameters(remove_duplicate=False)
        tied = {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}
        checkpoint |= {
            "consumed": {"samples": of_run.num_samples, "tokens": 0},
            "strategy": type(self.engine).__name__,
            "mesh": self.engine.mesh.sizes(),
            "loggers": {type(logger).__name__: logger.version for logger in self.trainer.loggers},
            "optimizer": [type(unwrap_optimizer(optimizer)).__name__ for optimizer in self.trainer.optimizers],
            "parameters": self.optimized_parameters,
            "group_values": [],
            "configured_groups": of_run.configured_groups,
            "tied": tied,
            "validated_to_end": is_at_end,
            "monitored": of_run.monitored_before_end if is_at_end else get_monitored(self.trainer),
            "rng": (of_run.rng_before_end or before_validation or rng_state()) | get_place(self.trainer),
        }

    def _leave_out_objects(self, checkpoint: dict[str, Any], added: Sequence[str]) -> None:
        """Take from a checkpoint what the module adds to it and no file could be loaded with."""
        is_object = self.recipes_of_run.is_object
        for key in added:
            if key not in is_object:
                is_object[key] = not is_loadable(checkpoint[key])
                if is_object[key] and self.trainer.is_global_zero:
                    LOGGER.info(f"No checkpoint has '{key}', objects that the module adds: a resume makes them again")
            if is_object[key]:
                del checkpoint[key]
        checkpoint["left_out"] = [key for key in added if key not in checkpoint]

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        given = dict(checkpoint)
        if self.hparams:
            given[self.CHECKPOINT_HYPER_PARAMS_KEY] = dict(self.hparams)
        if checkpoint.get("left_out"):
            of_new = {key: copy.copy(value) for key, value in given.items()}
            super().on_save_checkpoint(of_new)
            given |= {key: of_new[key] for key in checkpoint["left_out"]}
        super().on_load_checkpoint(given)
        checkpoint |= {key: given[key] for key in checkpoint if key in given}
        of_run = self.recipes_of_run
        of_run.num_samples = checkpoint["consumed"]["samples"]
        for logger in self.trainer.loggers:
            if hasattr(logger, "on_load_checkpoint"):
                logger.on_load_checkpoint(self.trainer, self, checkpoint)
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        if checkpoint["validated_to_end"] or _is_validation_due(checkpoint):
            # as if saved before that validation: Lightning would go on in an epoch that is over (2.6.6)
            for counts in (progress["total"], progress["current"]):
                counts["completed"] = counts["processed"] - 1
        of_run.resumed_monitored = checkpoint["monitored"]
        of_run.resumed_groups = checkpoint["optimizer_states"][0]["param_groups"]
        of_run.resumed_configured_groups = checkpoint.get("configured_groups", [])  # none from earlier versions
        checkpoint["optimizer_states"] *= max(1, len(checkpoint["optimizer"]))  # Lightning counts them
        states = checkpoint["rng"] if self.is_of_same_mesh(checkpoint) else []
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        of_run.resumed_rng = read_states(states, rank=rank, world_size=world_size)
        of_run.resumed_place = states[rank] if len(states) == world_size else None
        of_run.is_resumed = True

    def is_of_same_mesh(self, checkpoint: Mapping[str, Any]) -> bool:
        """Return whether each rank of this run holds what the same rank of the saving run held."""
        is_same_engine = checkpoint["strategy"] == type(self.engine).__name__
        return is_same_engine and bool(checkpoint["mesh"] == self.engine.mesh.sizes())

    def take_group_values(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: what the groups hold is in the checkpoint, whole."""

    @override
    def on_train_start(self) -> None:
        of_run = self.recipes_of_run
        self._check_plateaus()
        self.restore_rng()
        leave_room(self.trainer)
        if of_run.is_resumed:
            self._resume_groups()
            go_on_in_epoch(self.trainer, of_run.resumed_place)
            set_monitored(self.trainer, of_run.resumed_monitored)  # now: Lightning forgets all metrics before a run
            if not complete_batch(self.trainer):
                LOGGER.warning(
                    "ReduceLROnPlateau makes no step for the epoch of the checkpoint: its metric was not logged by then"
                )
        super().on_train_start()

    def _check_plateaus(self) -> None:
        """Reject a schedule that follows a metric of a validation that the run has not, before the first epoch."""
        if self.trainer.enable_validation:
            return
        for config in self.trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and str(config.monitor).startswith("val"):
                raise ConfigError(
                    f"monitor={config.monitor} of configure_optimizers",
                    "ReduceLROnPlateau follows it, and nothing is validated",
                    "a val_dataloader() and a validation_step(), or a metric of training as its monitor",
                )

    @override
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        end_restart(self.trainer)

    def _resume_groups(self) -> None:
        """Set learning rates and the rest of all groups to those of the checkpoint, which the schedules go on from."""
        saved = iter(self.recipes_of_run.resumed_groups)
        for optimizer in map(unwrap_optimizer, self.trainer.optimizers):
            for group in optimizer.param_groups:
                group |= {key: value for key, value in next(saved).items() if key not in _OF_DEVICE}
        of_run = self.recipes_of_run
        changed = {
            f"{key} {before[key]:g} -> {now[key]:g}"
            for before, now in zip(of_run.resumed_configured_groups, of_run.configured_groups, strict=False)
            for key in before.keys() & now.keys()
            if before[key] != now[key]
        }
        if changed and self.trainer.is_global_zero:
            LOGGER.warning(
                "The optimizer goes on with the settings of the checkpoint, as under Lightning's own Trainer, and not"
                " with what configure_optimizers sets now: %s. To go on with others, set them in on_train_start",
                ", ".join(sorted(changed)),
            )

    def on_rollback(self, trainer: lightning.Trainer, pl_module: Any, from_step: int, to_step: int) -> None:
        """Go on with the batches that follow: loaders are not rewound.

        Args:
            trainer: Lightning Trainer.
            pl_module: This module.
            from_step: Optimizer step at which the spike was detected.
            to_step: Optimizer step whose state has been restored.
        """
        self.recipes_of_run.window_loss = None
        leave_room(trainer)
        if from_step == trainer.max_steps:
            trainer.should_stop = False  # the run was about to end, but now has steps to repeat

    def restore_rng(self) -> None:
        """Restore the RNG state of the checkpoint, once; a new run goes on as the module's constructor left it."""
        of_run, trainer = self.recipes_of_run, self.trainer
        if of_run.is_rng_restored:
            return
        of_run.is_rng_restored = True
        if of_run.is_resumed or trainer.global_rank:
            restore(of_run.resumed_rng, seed=of_run.seed, rank=trainer.global_rank, step=trainer.global_step)


class _TakesTuples(lightning.LightningModule):
    """A module that takes a batch of ours as a tuple. Its hook would replace that of a data module of one's own."""

    recipes_of_run: _OfRun

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        keys = self.recipes_of_run.batch
        if isinstance(batch, dict) and all(key in batch for key in keys):
            batch = tuple(batch[key] for key in keys)
        return super().on_after_batch_transfer(batch, dataloader_idx)


def _is_validation_due(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a run was stopped before or in a validation, which the saver then does first."""
    of_callbacks = checkpoint.get("callbacks", {}).values()
    return any(isinstance(state, Mapping) and bool(state.get("validation_due")) for state in of_callbacks)


def _list_removed(of_user: Any) -> list[str]:
    """Return the hooks and arguments of a module that Lightning 2 has removed, and stops at once for."""
    ends = [f"{stage}_epoch_end" for stage in ("training", "validation", "test")]
    found = [name for name in ends if callable(getattr(of_user, name, None))]
    step = inspect.signature(of_user.training_step).parameters
    return found + [f"{name} of training_step" for name in ("optimizer_idx",) if name in step]


def _list_optimizers(configured: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in whatever form `configure_optimizers` returns them."""
    if isinstance(configured, torch.optim.Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return [configured["optimizer"]]
    if isinstance(configured, list | tuple):
        parts = configured[0] if len(configured) == 2 and isinstance(configured[0], list | tuple) else configured
        return [found for part in parts for found in _list_optimizers(part)]
    assert configured is None or isinstance(configured, LRScheduler | ReduceLROnPlateau), type(configured)
    return []


def _join(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states of several optimizers as one, keyed by the index of a parameter among those of all."""
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    for state in states:
        offset = sum(len(group["params"]) for group in joined["param_groups"])
        moved = [{**group, "params": [offset + index for index in group["params"]]} for group in state["param_groups"]]
        joined["param_groups"] += moved
        joined["state"] |= {offset + index: values for index, values in state["state"].items()}
    return joined


def _count_samples(batch: Any) -> int:
    """Return the samples of a batch of ours, or the length of the first tensor in any other; 0 without one."""
    if isinstance(batch, Mapping) and isinstance(batch.get("num_samples"), int):
        return int(batch["num_samples"])
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def leave_optimization_to_module(trainer: lightning.Trainer, *, typed: Sequence[str]) -> None:
    """Let a module with manual optimization clip and accumulate itself, which Lightning leaves to it.

    Raises:
        ConfigError: The command line asks for one of both.
    """
    for key, neutral in (("gradient_clip_val", None), ("accumulate_grad_batches", 1)):
        for setting in typed:
            if setting.lstrip("+").startswith(f"trainer.{key}=") and getattr(trainer, key) != neutral:
                reason = "the module optimizes manually (automatic_optimization = False), and does this itself"
                raise ConfigError(setting, reason, f"the same command without trainer.{key}")
        setattr(trainer, key, neutral)
