"""One run, typed: what later layers read instead of the config. Each fact is derived here, once. Imports no torch."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from recipes.config.compose import Composed, Config
from recipes.config.epochs import read_epochs
from recipes.config.instantiate import PARTIAL, RULES, TARGET, make, make_model, make_optimizer
from recipes.config.ranks import MODEL_SIZES, count_data_ranks, find_ranks, make_mesh, requested_devices
from recipes.config.signature import find_signature
from recipes.config.traits import (
    ModeTraits,
    OptimizerTraits,
    StrategyTraits,
    TaskTraits,
    find_pretrained,
    list_data,
    list_nodes,
    read_adapter,
    read_mode,
    read_optimizer,
    read_strategy,
    read_target_kind,
    read_task,
    select,
)
from recipes.mesh import Mesh
from recipes.numerics.accumulation import Accumulation, divide
from recipes.runtime.world import Ranks, num_gpus

_EVAL_STEPS = 100  # of `eval_every=auto`
_SAVE_STEPS = 100  # of `save_every=auto`
# sections that loading weights does not read, see `ResolvedRun.only_weights`
UNREAD_BY_LOADING = frozenset(
    {
        *("callbacks", "clipping", "data", "eval_data", "evaluator", "logger", "loss", "metrics", "optimizer"),
        *("reward", "rollout", "scheduler", "tokenizer", "transform"),
    }
)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of a model that others depend on; None where the model has no such setting.

    Attributes:
        num_classes: Size of the vocabulary, or number of classes.
        pretrained: Where its first weights come from; None: they are random.
    """

    num_layers: int | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    moe_intermediate_size: int | None = None
    num_classes: int | None = None
    pretrained: str | None = None


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """A run that another one is to start from, before it has run.

    Attributes:
        name: Its name, where another run has the folder that it starts from.
        config: Its config.
        saves: Whether it will have a checkpoint.
    """

    name: str
    config: Config
    saves: bool


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(Composed):
    """A composed run and everything that follows from its settings, each derived on first use.

    The check of the config reads the same object: it reports the errors that `ranks`, `mesh` and `accumulation` raise,
    so those of a checked run raise none.

    Attributes:
        placed_on: Ranks to place the run on, such as those of planned hardware; None: those of this command.
        awaited: The run that it is to start from, if that has not run yet; it is then only checked.
    """

    placed_on: Ranks | None = None
    awaited: Awaited | None = None

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return a variation of the run: everything that follows from the changed settings is derived again.

        Args:
            settings: Values and sections by dotted key, such as `trainer.accumulate_grad_batches`; a key may be new.
        """
        config: Config = dict(self.config)
        for key, value in settings.items():
            *sections, name = key.split(".")
            node = config
            for section in sections:
                node[section] = dict(node[section])
                node = node[section]
            node[name] = value
        return dataclasses.replace(self, config=config)

    def only_weights(self) -> Self:
        """Return the run with parts that read nothing, and that conf/ has, in the sections that loading does not read.

        Of the optimizer the rules stay, which freeze parts of the model.
        """
        config = self.config
        rules = {key: config["optimizer"][key] for key in RULES if key in config["optimizer"]}
        size = {"vocab_size": config["model"].get("vocab_size") or 2, "seq_len": 1, "num_samples": 1}
        random_tokens = {TARGET: "recipes.data.random_tokens.RandomTokens"} | size
        own_loaders = {TARGET: "recipes.data.own_datamodule.OwnDataModule", "module": None}
        neutral: Config = {
            "data": own_loaders if self.has_own_loaders else random_tokens,
            "loss": {TARGET: "recipes.loss.cross_entropy.CrossEntropy"},
            "optimizer": {TARGET: "recipes.optimizer.sgd.sgd", PARTIAL: True, "lr": 0.0} | rules,
            "scheduler": {TARGET: "recipes.scheduler.constant", PARTIAL: True, "warmup_steps": 0},
            "clipping": {TARGET: "recipes.clipping.none.NoClipping"},
        }
        return self.with_settings({name: neutral.get(name, {}) for name in UNREAD_BY_LOADING if name in config})

    def list_followers(self, key: str) -> list[str]:
        """Return a setting and all that only refer to it, directly or through others."""
        followers = [key]
        for follower in followers:  # grows
            followers += [
                name for name, origin in self.references.items() if origin == follower and name not in followers
            ]
        return followers

    def on(self, ranks: Ranks) -> Self:
        """Return the same run on other ranks."""
        return dataclasses.replace(self, placed_on=ranks)

    def make(self, key: str) -> Any:
        """Instantiate the section at a dotted key."""
        node = select(self.config, key)
        assert isinstance(node, Mapping), f"there is no section {key}"
        is_data = key == "data" or key.startswith("eval_data.")
        return make(node, data_section=key if is_data else None)

    def make_model(self) -> Any:
        """Instantiate the model, with its adapter and what of it is frozen."""
        return make_model(self.config)

    def make_optimizer(self) -> Any:
        """Return the function that makes the optimizer of a model."""
        return make_optimizer(self.config)

    def list_targets(self) -> list[str]:
        """Return the dotted path of everything that the config instantiates."""
        return [str(node["_target_"]) for _, node in list_nodes(self.config)]

    def describe_settings(self, *, without: Sequence[str]) -> str:
        """Return all settings as text, which is equal for runs that differ at most in these sections.

        Callbacks that only show what is trained do not count.
        """
        relevant = {key: value for key, value in self.config.items() if key not in without}
        callbacks: Mapping[str, Any] = self.config.get("callbacks") or {}
        targets = {name: str(node.get("_target_")) for name, node in callbacks.items() if isinstance(node, Mapping)}
        shown = [name for name, target in targets.items() if find_signature(target).constants.get("only_shows") is True]
        relevant["callbacks"] = {name: node for name, node in callbacks.items() if name not in shown}
        return json.dumps(relevant, sort_keys=True, default=str)

    # what the chosen options declare

    @cached_property
    def mode(self) -> ModeTraits:
        """What `mode=` does."""
        return read_mode(self.config["mode"])

    @property
    def reads_data(self) -> bool:
        """Whether the mode reads samples of the data; an evaluator has tasks of its own."""
        return self.mode.reads_data and not (self.mode.takes_evaluator and self.config.get("evaluator"))

    @cached_property
    def strategy(self) -> StrategyTraits:
        """What `strategy=` declares, and its settings."""
        return read_strategy(self.config["strategy"])

    @cached_property
    def task(self) -> TaskTraits:
        """What `task=` declares."""
        return read_task(self.config["task"])

    @cached_property
    def optimizer(self) -> OptimizerTraits:
        """What `optimizer=` declares."""
        return read_optimizer(self.config["optimizer"])

    @cached_property
    def adapter(self) -> str | None:
        """Name of the adapter; None: all weights are trained."""
        return read_adapter(self.config.get("adapter"))

    @cached_property
    def runs_elsewhere(self) -> bool:
        """Whether the launcher runs on other machines, whose GPUs are unknown here."""
        return find_signature(select(self.config, "launcher._target_")).constants.get("runs_elsewhere") is True

    # where it runs, and how a step is divided

    @cached_property
    def ranks(self) -> Ranks:
        """The existing ranks, else those that the run starts; one where the mode takes no steps.

        Raises:
            ConfigError: Existing ranks, requested ranks and the machine contradict each other.
        """
        return self.placed_on or self._find_ranks(os.environ)

    @cached_property
    def requested_ranks(self) -> Ranks:
        """The ranks that the run starts where no launcher has started any. Raises the same errors as `ranks`."""
        return self._find_ranks({})

    def _find_ranks(self, environ: Mapping[str, str]) -> Ranks:
        return find_ranks(
            self.config["trainer"], self.mode, self.strategy, runs_elsewhere=self.runs_elsewhere, environ=environ
        )

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the ranks; of one rank where the mode takes no steps, unless it is placed elsewhere.

        Raises:
            ConfigError: The sizes do not divide the ranks, or the strategy has no such dimension.
        """
        is_divided = self.placed_on is not None or self.mode.takes_steps
        return make_mesh(self.config, self.strategy, self.ranks) if is_divided else Mesh()

    @cached_property
    def num_data_ranks(self) -> int:
        """Number of ranks with samples of their own, even if the sizes of the mesh do not divide the ranks."""
        return count_data_ranks(self.config, self.ranks.world_size)

    @cached_property
    def has_own_loaders(self) -> bool:
        """Whether the data is a LightningDataModule of one's own, whose loaders decide what a batch is."""
        return find_signature(str(select(self.config, "data._target_"))).constants.get("has_own_loaders") is True

    @cached_property
    def accumulation(self) -> Accumulation:
        """The global batch in micro-batches; of loaders of one's own, whose batches are not known, in units of them.

        Raises:
            ConfigError: It does not divide, or the settings contradict each other.
        """
        if self.has_own_loaders:
            number = self.accumulate_grad_batches or 1
            size = number * self.num_data_ranks
            return Accumulation(global_batch_size=size, micro_batch_size=1, num_micro_batches=number)
        return divide(
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            num_devices=self.num_data_ranks,
            accumulate_grad_batches=self.accumulate_grad_batches,
        )

    @cached_property
    def on_gpu(self) -> bool:
        """Whether this machine has a GPU that the Trainer may use; imports torch if there is a driver."""
        return self.accelerator != "cpu" and num_gpus() > 0

    @cached_property
    def compile_mode(self) -> str | None:
        """Mode of torch.compile on this machine; None is eager."""
        return self.compile_mode_on(gpu=self.on_gpu if self.config["compile"] == "auto" else False)

    def compile_mode_on(self, *, gpu: bool) -> str | None:
        """Return the mode of torch.compile; None is eager.

        `auto` compiles on a GPU, except under ZeRO-3, where gathering whole blocks has been tried on CPUs only.
        """
        setting = self.config["compile"]
        if setting == "auto":
            setting = gpu and self.strategy.stage != 3
        if isinstance(setting, bool):
            return "default" if setting else None
        return str(setting)

    # what a step reads, and how many there are

    @cached_property
    def tokens_per_sample(self) -> int | None:
        """Tokens of every training sample; None if the samples are not text, or are padded, by unknown numbers."""
        nodes = [node for place, node in list_data(self.config) if not place.startswith("eval_data.")]
        is_padded = any(find_signature(node["_target_"]).constants.get("pads_samples") for node in nodes)
        return None if is_padded else self.seq_len

    @cached_property
    def eval_samples(self) -> int | None:
        """Number of validation samples; None is all.

        `auto` limits validation to 2 % of a run's time. Without its backward pass a sample takes a third of the time,
        so this is 6 % of the samples trained on between two validations, and at least one global batch.
        """
        chosen: int | str | None = self.config["eval_samples"]
        if not isinstance(chosen, str):
            return chosen
        return max(6 * self.eval_every * self.global_batch_size // 100, self.global_batch_size)

    @cached_property
    def tries_convolutions(self) -> bool:
        """Whether to enable cuDNN benchmarking: as set, else for batches of one shape, unless deterministic."""
        typed: bool | None = self.config["trainer"].get("benchmark")
        if typed is not None:
            return typed
        return self.task.has_fixed_shapes and not self.config["trainer"].get("deterministic")

    # settings with a type

    @property
    def name(self) -> str:
        """Name in the logger and the report."""
        return str(self.config["name"])

    @property
    def tags(self) -> list[str]:
        """User-defined labels."""
        return list(self.config["tags"])

    @property
    def seed(self) -> int:
        """Seed of weights, data order and dropout."""
        return int(self.config["seed"])

    @property
    def resume(self) -> str | None:
        """`auto`, a run folder or a checkpoint; None starts at step 0."""
        return None if self.config["resume"] is None else str(self.config["resume"])

    @property
    def start_from(self) -> str | None:
        """Run folder or checkpoint whose weights a new run begins with; None: its own."""
        return None if self.config["start_from"] is None else str(self.config["start_from"])

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all devices."""
        return int(self.config["global_batch_size"])

    @property
    def micro_batch_size(self) -> int | None:
        """Samples per device per forward pass as set; None: derived."""
        size: int | None = self.config["micro_batch_size"]
        return size

    @property
    def accumulate_grad_batches(self) -> int | None:
        """Micro-batches per optimizer step as set; None: derived."""
        number: int | None = self.config["trainer"]["accumulate_grad_batches"]
        return number

    @property
    def seq_len(self) -> int | None:
        """Tokens of a sample before padding; None: the samples are not text."""
        return None if self.config["seq_len"] is None else int(self.config["seq_len"])

    @property
    def images_per_row(self) -> int:
        """Images that a plan assumes among the tokens of a row; 0: the task reads none there."""
        if "reads_images" not in self.task.supports:
            return 0
        return int(self.config["plan"].get("images_per_row", 1))  # none in the config of an older run

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the run; a number longer than any while `epochs` says how long it is."""
        return int(self.config["trainer"]["max_steps"])

    @property
    def eval_every(self) -> int:
        """Optimizer steps between two validations, if they are not counted in epochs."""
        typed: int | str = self.config["eval_every"]
        return typed if isinstance(typed, int) else _EVAL_STEPS

    @property
    def eval_epochs(self) -> int | None:
        """Epochs of loaders of one's own between two validations; None: `eval_every` counts steps."""
        typed: int | str = self.config["eval_every"]
        if not self.has_own_loaders or isinstance(typed, int):
            return None
        return 1 if typed == "auto" else read_epochs(typed)

    @property
    def save_every(self) -> int | str | None:
        """Optimizer steps between two checkpoints; epochs of loaders of one's own, `2epochs`, or `auto`; None: neither.

        A stream has no epochs, and validations of a language model take longer than a checkpoint: `auto` is a number.
        """
        typed: int | str | None = self.config["checkpoint"]["save_every"]
        if typed != "auto" or self.has_own_loaders:
            return typed
        return self.eval_every if self.task.has_own_training else _SAVE_STEPS

    @property
    def log_every(self) -> int:
        """Optimizer steps between two logged ones."""
        return int(self.config["log_every"])

    @property
    def accelerator(self) -> str | None:
        """`auto`, `cpu`, `gpu` or `cuda`; None is the Trainer's default."""
        named: str | None = self.config["trainer"].get("accelerator")
        return named

    @property
    def devices(self) -> int | str | list[int]:
        """Devices of a node as set: a number, a list of GPUs, or `auto`."""
        chosen: int | str | list[int] = self.config["trainer"]["devices"]
        return chosen

    @property
    def num_nodes(self) -> int:
        """Nodes as set."""
        return int(self.config["trainer"]["num_nodes"])

    @property
    def devices_per_node(self) -> int | None:
        """Devices of a node as set; None if the machine or a launcher decides."""
        return requested_devices(self.config["trainer"])

    @property
    def model_sizes(self) -> dict[str, int]:
        """Sizes of the mesh among ranks with the same samples, by setting."""
        return {name: self.config[name] for name in MODEL_SIZES}

    @property
    def pipeline_parallel_size(self) -> int:
        """Pipeline stages."""
        return int(self.config["pipeline_parallel_size"])

    @property
    def pipeline_schedule(self) -> str:
        """Name of the pipeline schedule in torch."""
        return str(self.config["pipeline_schedule"])

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that share the experts of a layer."""
        return int(self.config["expert_parallel_size"])

    @property
    def model(self) -> ModelSettings:
        """Settings of the model that others depend on."""
        node = self.config["model"]
        names = ModelSettings.__dataclass_fields__
        found = {name: value for name, value in node.items() if name in names}
        num_classes = node.get("vocab_size", node.get("num_classes"))
        return ModelSettings(**found | {"num_classes": num_classes, "pretrained": find_pretrained(node)})

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return float(self.config["optimizer"]["lr"])

    @property
    def ema_decay(self) -> float | None:
        """Decay of the moving average of the weights; None: there is none."""
        decay: float | None = self.config["ema_decay"]
        return decay

    @property
    def target_kind(self) -> str:
        """Kind of the targets of the data, such as `classes`."""
        return read_target_kind(self.config["data"])

    @property
    def num_workers(self) -> int | None:
        """Loader processes of a rank; None: chosen for this machine."""
        number: int | None = self.config["loader"]["num_workers"]
        return number

    @property
    def recomputes_every_block(self) -> bool:
        """Whether only the inputs of blocks are kept for the backward pass."""
        node = self.config["activation_checkpoint"]
        return bool(node["every_nth_block"] == 1 and node.get("save_ops", "inputs") == "inputs")

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.config["save_every"] is not None or self.config["save_every_minutes"] is not None

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints on the disk at the end of the run, and one that is being written."""
        if not self.saves:
            return 0
        node = self.config["checkpoint"]
        every = node["keep_every"]
        num_kept = self.max_steps // every if every and self.epochs is None else 0
        return int(node["keep_last"] + node["keep_best"] + 1 + num_kept)

    @property
    def num_host_snapshots(self) -> int:
        """Copies of the state that a rollback needs in host memory."""
        nodes = [node for node in self.config["callbacks"].values() if isinstance(node, Mapping)]
        kept = [
            int(node["num_snapshots"])
            for node in nodes
            if node.get("action") == "rollback" and node.get("snapshot_storage") != "disk"
        ]
        return max(kept, default=0)

    @property
    def memory_gib(self) -> float | None:
        """Memory of a device that `plan.memory_gib` states; None: that of the machine."""
        stated: float | None = (self.config.get("plan") or {}).get("memory_gib")
        return stated

    @property
    def cache_dir(self) -> str:
        """Folder for what is made of the data."""
        return str(self.config["data"]["cache_dir"])

    @property
    def loggers(self) -> Mapping[str, Any]:
        """Settings of each logger, by name."""
        nodes: Mapping[str, Any] = self.config["logger"]
        return nodes

    @property
    def quality(self) -> dict[str, Any]:
        """Rules by which `mode=prepare` drops documents."""
        rules: dict[str, Any] = self.config.get("quality", {})
        return rules

    @property
    def precision(self) -> str:
        """Name of the precision, such as `bf16-mixed`."""
        return str(self.config["precision"]["name"])


def resolve(composed: Composed) -> ResolvedRun:
    """Return the composed run with everything that follows from it."""
    return ResolvedRun(**{field.name: getattr(composed, field.name) for field in dataclasses.fields(Composed)})


def to_json(run: ResolvedRun) -> str:
    """Serialize what a run was composed of, for another process."""
    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(Composed)}
    return json.dumps(fields | {"run_folder": str(run.run_folder)})


def from_json(text: str) -> ResolvedRun:
    """Return the run that `to_json` serialized, resolved for this process."""
    fields = json.loads(text)
    return ResolvedRun(**fields | {"run_folder": Path(fields["run_folder"])})
