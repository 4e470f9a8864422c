"""Save and restore a task's checkpoint entries: counters, parameter names, RNG state and hyperparameters."""

import copy
import functools
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from recipes.adapter import is_adapter
from recipes.blocks import apart
from recipes.checkpoint.layout import are_equal, read_values, shard_name
from recipes.checkpoint.rng_state import GeneratorStates, read_states, restore, rng_state
from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shard_file import write_shard
from recipes.checkpoint.start_from import FrozenBase, Ranks, SourceRun
from recipes.clipping import Clipping
from recipes.engine import Engine, get_engine
from recipes.errors import ConfigError
from recipes.lightning_internals import get_data, skip_validation_once
from recipes.model.init import unsharded_shape
from recipes.model.weights.adapter import has_adapter
from recipes.model.weights.files import hash_parts, list_places
from recipes.numerics.collectives import gather_objects
from recipes.numerics.ema import NAME as AVERAGE
from recipes.numerics.nf4 import list_nf4
from recipes.optimizer.param_groups import drop_unused_groups
from recipes.optimizer.rules import GroupRow, get_rules, list_rows
from recipes.parallel.stages import is_copy
from recipes.task.frozen import Base, FrozenModel, check_base, check_frozen_model, naming

_NOT_KEPT = ("params", "lr", "initial_lr")  # of an optimizer's groups: the config decides them


class OnEngine(lightning.LightningModule):
    """A task that knows the engine of its run."""

    @property
    def engine(self) -> Engine:
        """Strategy of the run; raises RuntimeError before the task is attached to a Trainer."""
        return get_engine(self.trainer)


class Resumable(OnEngine):
    """A task that resumes from a checkpoint of any strategy, on any number of ranks.

    Args:
        seed: Seed of the initial weights and of each rank's RNG state.
        clipping: Gradient clipping whose history is part of the train state.
        keeps_average: Whether the optimizer state holds an EMA of the weights.

    Attributes:
        seed: Seed of the initial weights and of each rank's RNG state.
        optimized_parameters: Names of the parameters in the optimizer's groups, in that order; a parameter in two
            groups appears twice.
        group_rows: Table of the optimizer's groups and of what is frozen; empty without rules on parameters.
        num_samples: Samples consumed so far over all ranks; a host integer.
        num_tokens: Tokens consumed so far over all ranks; a host integer.
        awaits_checkpoint: Whether weights will be loaded from a checkpoint, so that initialization is skipped.
        has_known_state: Whether the optimizer is torch's or one of these, whose tensors are float32 or of the dtype of
            their parameter; others may keep whole numbers or codes.
        model_settings: Settings of the model that change what its weights compute, for the checkpoint.
        model_arguments: All settings of the model, for advice on them.
        setting_of_another_model: What was set if the checkpoint is of another model.
        fix_of_another_model: What to type if the checkpoint is of another model.
        first_weights: Weights of another run that this one starts from, or that are frozen beside its adapter.
        find_start: Returns the run whose weights this one took first, after a resume, too; None: it started from none.
        started_from: The runs that this one started from, newest first: path, step, weights and hash of each.
    """

    awaits_checkpoint = False
    has_known_state = False
    model_settings: Mapping[str, Any] = MappingProxyType({})
    model_arguments: Mapping[str, Any] = MappingProxyType({})
    setting_of_another_model = "resume=…"
    fix_of_another_model = "resume=<a run of this model>"
    first_weights: SourceRun | FrozenBase | None = None
    find_start: Callable[[], SourceRun | None]
    model: nn.Module
    started_from: Sequence[Mapping[str, Any]] = ()

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
        self._resumed_group_values: list[dict[str, Any]] = []
        self._resumed_optimizer: str | None = None
        self._resumed_parameters: list[str] | None = None
        self.group_rows: list[GroupRow] = []
        self._resumed_rng: GeneratorStates | None = None
        self._rng_is_restored = False
        self._base_of_adapter: Base | None = None
        self._bases_of_models: dict[str, Base] = {}  # of the frozen models beside the trained one
        self.find_start = lambda: None
        self._resumed_bases: Mapping[str, Mapping[str, Any]] | None = None  # as a checkpoint has them

    @abstractmethod
    def meta_model(self) -> nn.Module:
        """Return an unsharded model without storage."""

    def recipes_consumed(self) -> tuple[int, int]:
        """Return the samples and tokens consumed so far over all ranks, for callbacks."""
        return self.num_samples, self.num_tokens

    # Optimizer: recorded when it is built, set up when training starts.

    def remember_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the optimizer's class and parameter names before an engine wraps or shards them.

        Raises:
            ConfigError: The checkpoint holds the state of another optimizer.
        """
        self._optimizer = getattr(optimizer, "state_of", type(optimizer).__name__)
        self.has_known_state = type(optimizer).__module__.startswith(("torch.optim.", "recipes."))
        check_optimizer(self._optimizer, self._resumed_optimizer)
        counts = [[(len(group["params"]), _count_own(group["params"])) for group in optimizer.param_groups]]
        pipeline = self.engine.groups.pipeline
        if pipeline is not None:
            counts = gather_objects(counts[0], pipeline)
        of_groups = [
            (sum(tensors), sum(own))
            for tensors, own in (zip(*group, strict=True) for group in zip(*counts, strict=True))
        ]
        drop_unused_groups(optimizer, used=[num_tensors > 0 for num_tensors, _ in of_groups])
        rules = get_rules(self.model)
        if rules is not None:
            num_elements = [number for num_tensors, number in of_groups if num_tensors]
            self.group_rows = list_rows(optimizer.param_groups, num_elements, rules)
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        self.optimized_parameters = [
            names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
        ]
        tied = self._tied
        self._every_parameter = self._gather_names([name for name in self.optimized_parameters if name not in tied])
        check_trained(self._every_parameter, self._resumed_parameters)

    def _gather_names(self, own: list[str]) -> list[str]:
        """Return the names from all pipeline ranks without duplicates, first layers first."""
        group = self.engine.groups.pipeline
        if group is None:
            return own
        return list(dict.fromkeys(name for of_rank in gather_objects(own, group) for name in of_rank))

    def remember_hyperparameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the hyperparameters of the config, which loading a checkpoint overwrites."""
        # deep: an optimizer may change a tensor or a list of a group in place
        self._hyperparameters = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def take_group_values(self, values: list[dict[str, Any]]) -> None:
        """Keep what the optimizer of a checkpoint kept in each of its parameter groups, for `resume_optimizer`.

        Raises:
            ValueError: They are not what `_get_group_values` returns.
        """
        if not all(isinstance(of_group, Mapping) and of_group.keys().isdisjoint(_NOT_KEPT) for of_group in values):
            raise ValueError("what the optimizer kept in its groups holds other groups or learning rates")
        self._resumed_group_values = values

    def _get_group_values(self) -> list[dict[str, Any]]:
        """Return what the optimizer itself keeps in its groups: values that are no longer those of the config.

        Some optimizers estimate a step size or count steps there. Learning rates follow from the config.
        """
        current = self.trainer.optimizers[0].param_groups if self.trainer.optimizers else []
        return [
            {
                key: value
                for key, value in group.items()
                if key not in _NOT_KEPT and (key not in configured or not are_equal(value, configured[key]))
            }
            for group, configured in zip(current, self._hyperparameters, strict=True)
        ]

    def resume_optimizer(self, schedule: Callable[[int], float]) -> None:
        """Set hyperparameters and learning rates from the config; keep the optimizer state of the checkpoint.

        Args:
            schedule: Optimizer step, from 0 -> multiplier of the peak learning rate.
        """
        optimizer, scheduler = self.trainer.optimizers[0], self.lr_schedulers()
        assert isinstance(scheduler, LambdaLR), "configure_optimizers returns one LambdaLR"
        for index, (group, configured) in enumerate(zip(optimizer.param_groups, self._hyperparameters, strict=True)):
            group |= copy.deepcopy(configured) | {"initial_lr": configured["lr"]}
            group |= self._resumed_group_values[index] if index < len(self._resumed_group_values) else {}
            group["lr"] = configured["lr"] * schedule(scheduler.last_epoch)
        scheduler.base_lrs = [configured["lr"] for configured in self._hyperparameters]
        self.restore_rng()

    def restore_rng(self) -> None:
        """Restore the RNG state of the checkpoint, once; without a checkpoint, seed this rank.

        Code that runs earlier may draw random numbers; code that runs later must draw the same ones as without a
        resume.
        """
        if self._rng_is_restored:
            return
        restore(self._resumed_rng, seed=self.seed, rank=self.trainer.global_rank, step=self.trainer.global_step)
        self._rng_is_restored = True

    # Checkpoints.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["consumed"] = {"samples": self.num_samples, "tokens": self.num_tokens}
        checkpoint["strategy"] = type(self.engine).__name__
        checkpoint["mesh"] = self._mesh_sizes
        checkpoint["loggers"] = {type(logger).__name__: logger.version for logger in self.trainer.loggers}
        checkpoint["optimizer"] = self._optimizer
        checkpoint["parameters"] = self.optimized_parameters
        checkpoint["every_parameter"] = self._every_parameter
        checkpoint["group_values"] = self._get_group_values()
        checkpoint["base"] = None if self._base_of_adapter is None else self._base_of_adapter.state()
        checkpoint["frozen_models"] = {name: base.state() for name, base in self._bases_of_models.items()}
        checkpoint["published_config"] = self._published_config
        checkpoint["started_from"] = [dict(each) for each in self.started_from]
        checkpoint["model_settings"] = dict(self.model_settings)
        frozen = self.frozen_names()
        for name in frozen:
            checkpoint["state_dict"].pop(name, None)  # this rank's shards
        checkpoint["tied"] = {name: first for name, first in self._tied.items() if name not in frozen}
        checkpoint["rng"] = rng_state()
        checkpoint["clipping"] = self.recipes_live_scalars()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_keys(checkpoint, get_data(self.trainer))
        tensors = self.state_dict(keep_vars=True)
        frozen = self.frozen_names()
        shapes = {name: unsharded_shape(tensor) for name, tensor in tensors.items() if name not in frozen}
        if self.whole_model is not None:  # includes the layers of other pipeline ranks
            shapes = {f"model.{name}": tensor.shape for name, tensor in self.whole_model.state_dict().items()}
        check_settings(self.model_settings, checkpoint["model_settings"], fix=self.fix_of_another_model)
        setting, fix = self.setting_of_another_model, self.fix_of_another_model
        check_model(shapes, checkpoint["state_dict"], setting=setting, fix=fix)
        published = checkpoint["published_config"]
        check_published_config(self._published_config, published, str(getattr(self.model, "name", "")))
        check_base(self._base_of_adapter, checkpoint["base"])
        self._resumed_bases = checkpoint.get("frozen_models", {})
        for name, base in self._bases_of_models.items():
            check_frozen_model(name, base, self._resumed_bases.get(name))
        self.awaits_checkpoint = False
        self.started_from = checkpoint.get("started_from", [])  # none from earlier versions
        self.num_samples = checkpoint["consumed"]["samples"]
        self.num_tokens = checkpoint["consumed"]["tokens"]
        for logger in self.trainer.loggers:
            if hasattr(logger, "on_load_checkpoint"):
                logger.on_load_checkpoint(self.trainer, self, checkpoint)
        self._resumed_optimizer = checkpoint["optimizer"]
        self._resumed_parameters = checkpoint["parameters"]
        if self._optimizer is not None:  # some engines load after the optimizer is built
            check_optimizer(self._optimizer, self._resumed_optimizer)
            check_trained(self._every_parameter, self._resumed_parameters)
        # RNG states belong to a rank's place in the mesh, whichever ranks shard the weights
        is_same_place = _get_model_sizes(checkpoint["mesh"]) == _get_model_sizes(self._mesh_sizes)
        states = checkpoint["rng"] if is_same_place else []
        self._resumed_rng = read_states(states, rank=self.trainer.global_rank, world_size=self.trainer.world_size)
        if self.is_of_same_mesh(checkpoint):
            # Lightning would give every rank the callback states of rank 0
            of_rank = read_values(checkpoint, self.trainer.global_rank)
            checkpoint["callbacks"] = of_rank.get("callbacks", checkpoint.get("callbacks", {}))
        self.recipes_restore_scalars(checkpoint["clipping"])
        # the functions of the schedule are those of the config, for as many groups as its rules make
        for schedule in checkpoint.get("lr_schedulers", []):
            schedule["lr_lambdas"] = []
        if not self._keeps_average:
            for state in checkpoint["optimizer_states"][0]["state"].values():
                state.pop(AVERAGE, None)
        recount_micro_batches(checkpoint, self.trainer.accumulate_grad_batches)

    def recipes_save_weights(self, folder: Path) -> None:
        """Write this rank's shard of the weights only, in the checkpoint file format."""
        folder.mkdir(parents=True, exist_ok=True)
        shards = self.engine.lightning_module_state_dict()
        left_out = {*self._tied, *self.frozen_names()}
        on_host = {
            name: replace(shard, tensor=shard.tensor.cpu()) for name, shard in shards.items() if name not in left_out
        }
        path = folder / shard_name(self.trainer.global_rank)
        path.unlink(missing_ok=True)
        write_shard(path, on_host)

    @property
    def _mesh_sizes(self) -> dict[str, Any]:
        """Number of ranks along each mesh dimension that has more than one, and the schedule of a pipeline."""
        mesh = self.engine.mesh
        return mesh.sizes() | ({"schedule": mesh.pipeline_schedule} if mesh.pipeline > 1 else {})

    def is_of_same_mesh(self, checkpoint: dict[str, Any]) -> bool:
        """Return whether each rank of this run holds what the same rank of the saving run held."""
        is_same_engine = checkpoint["strategy"] == type(self.engine).__name__
        return is_same_engine and bool(checkpoint["mesh"] == self._mesh_sizes)

    @functools.cached_property
    def whole_model(self) -> nn.Module | None:
        """Model with the layers of all ranks, without storage; None without pipeline parallelism."""
        if self.engine.groups.pipeline is None:
            return None
        return self.meta_model()

    @property
    def _tied(self) -> dict[str, str]:
        """Additional names of tied parameters -> first name, including parameters on other pipeline ranks."""
        first: dict[int, str] = {}
        every = list(self.named_parameters(remove_duplicate=False))
        if self.whole_model is not None:
            every = [(f"model.{name}", p) for name, p in self.whole_model.named_parameters(remove_duplicate=False)]
        return {
            name: first[id(parameter)] for name, parameter in every if first.setdefault(id(parameter), name) != name
        }

    def frozen_names(self) -> frozenset[str]:
        """Return the names of parameters excluded from a checkpoint: with an adapter, the frozen weights beside it.

        Weights that are frozen by a rule are in it: a run would otherwise not be whole, nor could it be exported.
        """
        if not has_adapter(self.model):
            return frozenset()
        every = self.named_parameters(remove_duplicate=False)
        return frozenset(name for name, parameter in every if not (parameter.requires_grad or is_adapter(name)))

    def prepare_first_weights(self, model: nn.Module) -> None:
        """Check the weights of another run against the model, which takes them instead of its own. Collective.

        Args:
            model: The whole model on the meta device.

        Raises:
            ConfigError: They do not fit.
        """
        if self.first_weights is None:
            return
        self._give_weights(model, self.first_weights)
        if not self.awaits_checkpoint:
            self.started_from = self.first_weights.steps

    def prepare_weights_of_copy(self, model: nn.Module) -> None:
        """Let a frozen copy take the weights that the run began with, after a resume, too. Collective.

        Args:
            model: The copy, on the meta device.

        Raises:
            ConfigError: They were those of another run, which is damaged or not there.
        """
        if self.start is not None:
            self._give_weights(model, self.start)

    @functools.cached_property
    def start(self) -> SourceRun | None:
        """The run whose weights this one took first."""
        return self.find_start()

    def _give_weights(self, model: nn.Module, source: SourceRun | FrozenBase) -> None:
        with apart(model):  # a model of values begins with the same weights
            source.prepare(model, Ranks(is_first=self.trainer.is_global_zero, broadcast=self.engine.broadcast))
        untyped: Any = model
        untyped.first_weights = source

    def remember_base(self) -> None:
        """Record which frozen weights were loaded beside an adapter; a collective, if they were read from files."""
        model: Any = self.model
        if not has_adapter(model):
            return
        if self.first_weights is not None:
            record = self.first_weights.record
            in_nf4 = any(list_nf4(model))
            self._base_of_adapter = Base(record.name, record.hash, in_nf4=in_nf4, weights=record.weights)
            return
        self._base_of_adapter = self._identify(model)

    def remember_frozen_model(self, name: str, model: nn.Module, frozen: FrozenModel) -> None:
        """Record which frozen model the run is trained beside; a collective, if its weights were read from files.

        Args:
            name: Its name.
            model: With its weights.
            frozen: What it is.

        Raises:
            ConfigError: The checkpoint that was loaded is of a run beside another one.
        """
        source = self.start if frozen.is_copy else None
        if source is None:
            base = self._identify(model, {**frozen.settings, **_get_published_config(model)})
        else:
            path, weights = (str(source.steps[0][key]) for key in ("path", "weights"))
            base = Base(path, source.hash, weights=weights)
        self._remember(name, replace(base, is_copy=frozen.is_copy))

    def remember_published_model(self, section: str, pretrained: str) -> None:
        """Record a published model that another process asks. Collective.

        Args:
            section: Its section of the config.
            pretrained: Its folder or hub name.

        Raises:
            ConfigError: The checkpoint that was loaded is of a run with another one, or its files cannot be read.
        """
        with naming(section):
            base = Base(pretrained, self._hash([pretrained]))
        self._remember(section, base)

    def _remember(self, name: str, base: Base) -> None:
        self._bases_of_models[name] = base
        if self._resumed_bases is not None:  # it is held after the checkpoint was loaded
            check_frozen_model(name, base, self._resumed_bases.get(name))

    def _identify(self, model: nn.Module, settings: Mapping[str, Any] = MappingProxyType({})) -> Base:
        """Return the identity of a model's frozen weights."""
        places = list_places(model)
        digest, name = (self._hash(places), " and ".join(places)) if places else (None, str(self.seed))
        return Base(name, digest, in_nf4=any(list_nf4(model)), settings=dict(settings))

    def _hash(self, places: Sequence[str]) -> str:
        digest = self.engine.broadcast(hash_parts(places) if self.trainer.is_global_zero else None)
        assert digest is not None, "that of the first rank"
        return digest

    @property
    def _published_config(self) -> dict[str, Any]:
        """Settings of the model that its published config.json decides; empty for a model whose settings are typed."""
        return _get_published_config(self.model)

    # Rollbacks.

    def recipes_live_scalars(self) -> dict[str, Any]:
        """Return the non-tensor state that a rollback restores: the clipping history, by class name."""
        return {type(self.clipping).__name__: self.clipping.state_dict()}

    def recipes_restore_scalars(self, scalars: dict[str, Any]) -> None:
        """Restore the result of `recipes_live_scalars`; the history of a different clipping class is ignored."""
        history = scalars.get(type(self.clipping).__name__)
        if history is not None:
            self.clipping.load_state_dict(history)

    def on_rollback(self, trainer: lightning.Trainer, pl_module: Any, from_step: int, to_step: int) -> None:
        """Rewind Lightning's micro-batch counters; the data stream keeps its own position and is not rewound.

        Args:
            trainer: Lightning Trainer.
            pl_module: This task.
            from_step: Optimizer step at which the spike was detected.
            to_step: Optimizer step whose state has been restored.
        """
        loop = trainer.fit_loop.epoch_loop
        done = to_step * trainer.accumulate_grad_batches
        for counts in (loop.batch_progress.total, loop.batch_progress.current):
            vars(counts).update(dict.fromkeys(vars(counts), done))
            counts.completed = done - 1  # the current micro-batch is counted when it ends
        skip_validation_once(trainer, step=to_step)  # if this step is due for validation, that has already run
        if from_step == trainer.max_steps:
            trainer.should_stop = False  # the run was about to end, but now has steps to repeat


def _get_published_config(model: Any) -> dict[str, Any]:
    config = getattr(model, "published_config", None)
    return {} if config is None else config()


def _get_model_sizes(sizes: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of the mesh dimensions along which ranks work on the same samples."""
    return {name: size for name, size in sizes.items() if name not in ("replicate", "shard", "schedule")}


# Check that a checkpoint matches the model and optimizer of this run, and adjust its micro-batch counters.

_NEEDED = (
    "loops",
    "consumed",
    "strategy",
    "mesh",
    "loggers",
    "optimizer",
    "clipping",
    "base",
    "model_settings",
    "published_config",
)


def check_keys(checkpoint: Mapping[str, Any], data: object) -> None:
    """Check that a checkpoint has what a run goes on from: without some of it Lightning would begin again, silently.

    Args:
        checkpoint: Lightning checkpoint.
        data: Data module that goes on from it; None if nothing is trained.

    Raises:
        ValueError: Something is missing, no count, or of another step.
    """
    goes_on = () if data is None else ("callbacks", "lr_schedulers", type(data).__qualname__)
    missing = [key for key in (*_NEEDED, *goes_on) if key not in checkpoint]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    if goes_on and len(checkpoint["lr_schedulers"]) != 1:
        raise ValueError(
            f"it has the state of {len(checkpoint['lr_schedulers'])} schedules of the learning rate, not 1"
        )
    _check_counts(checkpoint)
    if goes_on:
        _check_steps(checkpoint)


def _check_counts(checkpoint: Mapping[str, Any]) -> None:
    """Check what Lightning and the task take over unread, and compute with in the first step."""
    counts = [(f"consumed {name}", checkpoint["consumed"][name]) for name in ("samples", "tokens")]
    schedules = checkpoint.get("lr_schedulers", [])
    counts += [("the step of the schedule", schedule["last_epoch"]) for schedule in schedules]
    for name, count in counts:
        if type(count) is not int or not 0 <= count < 2**62:
            raise ValueError(f"{name} is {str(count)[:40]}, not a count")


def _check_steps(checkpoint: Mapping[str, Any]) -> None:
    """Check that the schedule and Lightning's own count of steps, with which a run goes on, are at its step."""
    step, loop = checkpoint["global_step"], checkpoint["loops"]["fit_loop"]
    progress = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    counts = {"the optimizer": progress["completed"], "the schedule": checkpoint["lr_schedulers"][0]["last_epoch"]}
    for name, count in counts.items():
        if count != step:
            raise ValueError(f"{name} is at step {count}, and the run at step {step}")


def check_settings(own: Mapping[str, Any], saved: Mapping[str, Any], *, fix: str) -> None:
    """Check that the model has the settings that its weights were trained with: some change no shape.

    The config check compares what is typed with the run's config.yaml, and this what that file says.

    Args:
        own: Settings of this run's model.
        saved: Those in the checkpoint.
        fix: What to type if one differs.

    Raises:
        ConfigError: A setting differs.
    """
    for key, value in saved.items():
        if key in own and own[key] != value:
            reason = f"the weights of the checkpoint were trained with model.{key}={value}"
            raise ConfigError(f"resume=… with model.{key}={own[key]}", reason, fix)


def check_model(own: Mapping[str, torch.Size], saved: Mapping[str, SavedTensor], *, setting: str, fix: str) -> None:
    """Check that the names and shapes of a model's tensors match the checkpoint.

    Args:
        own: Shapes by name.
        saved: Tensors of the checkpoint by name.
        setting: What was set, for the error.
        fix: What to type if they do not.

    Raises:
        ConfigError: A tensor is missing, unknown, or has a different shape.
    """
    own_shapes = {name: tuple(shape) for name, shape in own.items()}
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in own_shapes | saved_shapes:
        if own_shapes.get(name) != saved_shapes.get(name):
            raise ConfigError(
                setting,
                f"the checkpoint is of another model: {name} is {_show(saved_shapes.get(name))} there"
                f" and {_show(own_shapes.get(name))} here",
                fix,
            )


def check_published_config(own: Mapping[str, Any], saved: Mapping[str, Any], name: str) -> None:
    """Check that the config.json of a published model describes the model that the weights were trained in.

    Args:
        own: Settings in the file now; empty for models whose settings are typed.
        saved: Settings when the checkpoint was saved. Those that only one version of transformers has are not compared.
        name: Folder or hub name.

    Raises:
        ConfigError: A setting differs.
    """
    for key in sorted(own.keys() & saved.keys()):
        if json.dumps(own[key], sort_keys=True) != json.dumps(saved[key], sort_keys=True):  # NaN equals itself
            raise ConfigError(
                f"resume=… with the config.json of {name}",
                f"it has {key}={own[key]}, and the weights were trained with {key}={saved[key]}",
                "resume=… model.name=<folder with config.json and weights as they were>",
            )


def _show(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def check_optimizer(name: str, saved_name: str | None) -> None:
    """Check that the optimizer matches the checkpoint: a different optimizer cannot use its state.

    Args:
        name: Optimizer class of this run.
        saved_name: Optimizer class in the checkpoint; None without a checkpoint.

    Raises:
        ConfigError: The classes differ.
    """
    if saved_name not in (None, name):
        raise ConfigError(
            f"optimizer={name.lower()}",
            f"the checkpoint holds the state of {saved_name}",
            "the same command without optimizer=, or resume=null to train with another one",
        )


def check_trained(own: Sequence[str], saved: Sequence[str] | None) -> None:
    """Check that the trained parameters are those of the checkpoint, which has optimizer state for them alone.

    Other rates and decays are taken from the config, as all hyperparameters are.

    Args:
        own: Names of the trained parameters of this run.
        saved: Those in the checkpoint; None without a checkpoint.

    Raises:
        ConfigError: A parameter is trained in one of them only.
    """
    if saved is None or {*own} == {*saved}:
        return
    frozen, thawed = ([name for name in one if name not in {*other}] for one, other in ((saved, own), (own, saved)))
    name, how = (
        (frozen[0], "trained before and is frozen now") if frozen else (thawed[0], "frozen before and is trained now")
    )
    num_more = len(frozen) + len(thawed) - 1
    others = f", as {num_more} more are that differ" if num_more else ""
    raise ConfigError(
        "resume=… with other frozen parameters",
        f"{name.removeprefix('model.')} was {how}{others}: the optimizer would begin anew in the middle of a run",
        "the same command without freeze and optimizer.groups, or resume=null to train others from the start",
    )


def _count_own(parameters: Sequence[nn.Parameter]) -> int:
    """Return the number of elements of unsharded parameters, without those that are copies of another stage's."""
    return sum(unsharded_shape(parameter).numel() for parameter in parameters if not is_copy(parameter))


def recount_micro_batches(checkpoint: dict[str, Any], num_micro_batches: int) -> None:
    """Rewrite Lightning's micro-batch counters for a different number of micro-batches per step.

    Args:
        checkpoint: Lightning checkpoint, changed in place.
        num_micro_batches: Micro-batches per optimizer step of this run.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = checkpoint["global_step"] * num_micro_batches
    for counts in (progress["total"], progress["current"]):
        # 1 if the checkpoint was written before its micro-batch was counted as completed, else 0
        uncounted = counts["ready"] - counts["completed"]
        counts |= dict.fromkeys(counts, done) | {"completed": done - uncounted}
