"""What the chosen mode, strategy, task, adapter and optimizer declare on themselves, read without importing them."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from recipes.config.signature import find_signature

DATA_GROUPS = ("data.sources", "eval_data")  # sections of named nodes, each an option of data
_Mode = TypeVar("_Mode", bound=Callable[..., int])
# arguments of strategies that others than the strategy itself depend on
_SETTINGS = (
    "stage",
    "cpu_offload",
    "gradient_sync",
    "reshard_after_forward",
    "reduce_dtype",
    "offload_optimizer",
    "offload_parameters",
    "gather_for_generation",
)


@dataclass(frozen=True, kw_only=True)
class ModeTraits:
    """What a mode declares with `declare_mode`; the defaults suit a mode that reads files and runs on one device.

    Attributes:
        name: Name on the command line, `mode=<name>`.
        trains: Whether it trains in a run folder of its own.
        takes_steps: Whether it takes optimizer steps on the ranks and under the strategy of the run, as `trains` does.
        plans_steps: Whether it plans the steps of a run under its strategy, without taking any.
        prepares_data: Whether it writes documents to train on.
        reads_data: Whether it reads samples, or starts runs that do; others run where the data is not.
        needs_checkpoint: Whether it reads a checkpoint of a run.
        needs: What the task must support, such as `generate`; None: nothing.
        asks: Whether it waits for what a person types.
        writes: Folder that it writes in the run folder, unless `mode.path` names another; None: none.
        reads_logits: Whether it reads the logits of complete sequences on every rank.
        reads_micro_batches: Whether it reads the gradients of single micro-batches.
        takes_evaluator: Whether `evaluator=` says on which tasks it evaluates.
        takes_own_training: Whether it takes a LightningModule of one's own, by the steps that it has.
    """

    name: str
    trains: bool = False
    takes_steps: bool = False
    plans_steps: bool = False
    prepares_data: bool = False
    reads_data: bool = False
    needs_checkpoint: bool = False
    needs: str | None = None
    asks: bool = False
    writes: str | None = None
    reads_logits: bool = False
    reads_micro_batches: bool = False
    takes_evaluator: bool = False
    takes_own_training: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskTraits:
    """What a task declares on its class.

    Attributes:
        input_kind: Kind of its samples, such as `tokens` or `images`, or several kinds; None: it declares none.
        supports: What modes and settings may ask of it: `generate`, `export`, `evaluate_tasks`, `pipeline`.
        frozen_sections: Sections of the config with the frozen models that it asks, such as `teacher`.
        has_fixed_shapes: Whether all its batches have one shape, so that trying algorithms for it pays.
        has_own_training: Whether it is a LightningModule of one's own, with its own model, loss and optimizers.
        num_views: Random samples that it reads of each input, at one position of the data.
        unused_model_settings: Settings of the model for a part that the task replaces.
    """

    input_kind: str | tuple[str, ...] | None = None
    supports: frozenset[str] = frozenset()
    frozen_sections: tuple[str, ...] = ()
    has_fixed_shapes: bool = False
    has_own_training: bool = False
    num_views: int = 1
    unused_model_settings: tuple[str, ...] = ()

    @property
    def input_kinds(self) -> tuple[str, ...]:
        """All kinds of samples that it takes."""
        return (self.input_kind,) if isinstance(self.input_kind, str) else self.input_kind or ()


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """What an optimizer declares on its class; the defaults suit one that updates every element by itself.

    Attributes:
        name: Name of its module, which is that of its option.
        accepts_flat_partitions: Whether it can update the flat shards that ZeRO makes of all parameters.
        why_no_partitions: Why it cannot; None: it updates parameters one by one.
        needs_unsharded: Whether it reads whole matrices, or blocks of them.
        updates_matrices: Whether it treats every tensor with two or more axes as one matrix.
        keeps_average: Whether it averages the weights itself.
    """

    name: str
    accepts_flat_partitions: bool = True
    why_no_partitions: str | None = None
    needs_unsharded: bool = False
    updates_matrices: bool = False
    keeps_average: bool = False


def declare_mode(**traits: Any) -> Callable[[_Mode], _Mode]:
    """Declare what the decorated mode is; `read_mode` reads these literals from the source."""
    ModeTraits(name="", **traits)  # rejects an unknown name

    def leave(mode: _Mode) -> _Mode:
        return mode

    return leave


def read_mode(node: Mapping[str, Any]) -> ModeTraits:
    """Read the traits of a mode's config node."""
    target = str(node["_target_"])
    return ModeTraits(**{"name": target.rpartition(".")[2]} | _read_declared(target, ModeTraits))


def read_task(node: Mapping[str, Any]) -> TaskTraits:
    """Read the traits of a task's config node."""
    return TaskTraits(**_read_declared(str(node["_target_"]), TaskTraits))


def read_target_kinds(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the kinds of targets that a loss reads; empty: any."""
    declared: Any = find_signature(str(node["_target_"])).constants.get("target_kinds", ())
    return tuple(declared)


def read_target_kind(node: Mapping[str, Any]) -> str:
    """Read the kind of a data source's targets; a declared `{setting}` stands for the value of that setting."""
    declared = find_signature(str(node["_target_"])).constants.get("target_kind", "classes")
    return str(declared).format(**node)


def read_sample_kind(node: Mapping[str, Any]) -> str | None:
    """Read the kind of a data source's samples, likewise; None: it declares none."""
    declared = find_signature(str(node.get("_target_"))).constants.get("sample_kind")
    return None if declared is None else str(declared).format(**node)


def find_setting_of_kind(node: Mapping[str, Any], attribute: str) -> str | None:
    """Return the setting of a data source that says what its `sample_kind` or `target_kind` is; None: it is fixed."""
    declared = str(find_signature(str(node.get("_target_"))).constants.get(attribute, ""))
    return declared[1:-1] if declared[:1] == "{" else None


def read_optimizer(node: Mapping[str, Any]) -> OptimizerTraits:
    """Read the traits of an optimizer's config node."""
    target = str(node["_target_"])
    return OptimizerTraits(name=target.split(".")[-2], **_read_declared(target, OptimizerTraits))


def read_adapter(node: Mapping[str, Any] | None) -> str | None:
    """Return the name of an adapter's module; None if all weights are trained, as in older runs without a node."""
    if not node:
        return None
    target = str(node["_target_"])
    return target.split(".")[-2] if find_signature(target).constants.get("attaches", True) else None


# settings of a model that say where its first weights are
WEIGHT_KEYS = ("pretrained", "image_pretrained", "vision_pretrained", "language_pretrained")


def find_pretrained(model: Mapping[str, Any]) -> str | None:
    """Return the published weights of a model, or of its language model if it is put together; None: they are drawn."""
    whole: str | None = model.get("pretrained")
    return whole if whole is not None else model.get("language_pretrained")


# settings of a model by which it is trained or found, and its longest input: what its weights compute is the same
_NOT_OF_WEIGHTS: tuple[str, ...] = ("_target_", "_partial_", "name", "pretrained", "image_pretrained", "max_seq_len")
_NOT_OF_WEIGHTS += ("vocab_pad_multiple", "vision", "language", "vision_pretrained", "language_pretrained")
_OF_TRAINING = ("router_aux_loss_coef", "router_z_loss", "balance_rate")


def read_settings_of_weights(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model that change what its weights compute, several of them without changing any shape.

    Args:
        node: Config node of the model. A setting that it does not have has the default of the constructor.
    """
    parameters = find_signature(node["_target_"]).parameters
    defaults = {name: each.value.value for name, each in parameters.items() if isinstance(each.value, ast.Constant)}
    left_out = (*_NOT_OF_WEIGHTS, *_OF_TRAINING)
    values = {**node} | {name: value for name, value in defaults.items() if name not in node}
    return {key: value for key, value in values.items() if key not in left_out and "drop" not in key}


def read_free_at_resume(node: Mapping[str, Any]) -> frozenset[str]:
    """Return the settings that the class of a model lets a resume change if they are typed, as `free_at_resume`."""
    declared: Any = find_signature(node["_target_"]).constants.get("free_at_resume", ())
    return frozenset(declared)


def read_new_head_with(node: Mapping[str, Any]) -> frozenset[str]:
    """Return the settings of a model with which its head begins anew if they are not those of the run started from."""
    declared: Any = find_signature(node["_target_"]).constants.get("new_head_with", ())
    return frozenset(declared)


def _read_declared(target: str, traits: Any) -> dict[str, Any]:
    """Return those constants of a target that a class of traits has a field for."""
    constants = find_signature(target).constants
    return {name: value for name, value in constants.items() if name in traits.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class StrategyTraits:
    """What a strategy declares on its class; the defaults suit a strategy that declares nothing.

    Attributes:
        option: Name on the command line, `strategy=<option>`.
        needs_process_group: Whether it runs on several ranks.
        shards_weights: Whether each rank keeps a shard of the weights, block by block.
        replicates_state: Whether every rank keeps all weights and optimizer state.
        state_layout: Layout of weights, gradients and optimizer state over ranks: `whole`, `fsdp` or `zero`.
        clips_by_value: Whether it can clip each gradient value, not only the global norm.
        accepts_device_list: Whether `trainer.devices` may list GPUs whose indices do not start at 0.
        syncs_batch_norm: Whether Lightning can synchronize batch norm statistics over its ranks.
        shards_within_node: Whether every node has a copy of the model, sharded over its ranks.
        stage: ZeRO stage; None: not DeepSpeed.
        cpu_offload: Whether FSDP2 keeps weights, gradients and optimizer state in host memory.
        gradient_sync: When FSDP2 reduces gradients: `per_micro_batch` or `per_step`.
        reshard_after_forward: Whether FSDP2 frees gathered weights after the forward pass.
        reduce_dtype: Data type in which FSDP2 reduces gradients; None: that of the precision.
        offload_optimizer: Where DeepSpeed keeps the optimizer state: `cpu` or `nvme`; None: on the device.
        offload_parameters: Where DeepSpeed keeps the weights.
        gather_for_generation: When sharded weights are gathered for text: `auto`, `per_call` or `per_token`.
        frees_gradients: Whether gradients are freed after a step.
    """

    option: str
    needs_process_group: bool = True
    shards_weights: bool = False
    replicates_state: bool = False
    state_layout: str = "whole"
    clips_by_value: bool = True
    accepts_device_list: bool = True
    syncs_batch_norm: bool = False
    shards_within_node: bool = False
    stage: Literal[1, 2, 3] | None = None
    cpu_offload: bool = False
    gradient_sync: str = "per_micro_batch"
    reshard_after_forward: bool = True
    reduce_dtype: str | None = None
    offload_optimizer: str | None = None
    offload_parameters: str | None = None
    gather_for_generation: str = "auto"
    frees_gradients: bool = True

    @property
    def typed(self) -> str:
        """Return the override that selects the strategy."""
        return f"strategy={self.option}"


def read_strategy(strategy: Mapping[str, Any]) -> StrategyTraits:
    """Read the traits of a strategy's config node, and its settings; ZeRO shards the weights from stage 3 on."""
    target = str(strategy["_target_"])
    declared = {"option": target.rpartition(".")[2]} | _read_declared(target, StrategyTraits)
    declared |= {name: value for name, value in strategy.items() if name in _SETTINGS}
    if "stage" in strategy:
        declared["option"] = declared["option"].format(stage=strategy["stage"])
        declared["shards_weights"] = strategy["stage"] == 3
    return StrategyTraits(**declared)


def select(config: Mapping[str, Any], key: str) -> object:
    """Return the value at a dotted key; None where a section is missing or null."""
    value: object = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def is_place_of_data(place: str) -> bool:
    """Return whether an option of data may stand at a dotted place: `data.sources.mine`, `eval_data.mine`."""
    group, _, name = place.rpartition(".")
    return group in DATA_GROUPS and bool(name)


def is_place_of_model(place: str | None) -> bool:
    """Return whether a frozen model of some task may stand at a dotted place: `teacher`, but not `model` itself."""
    return place is not None and place.isidentifier() and place != "model"


def list_data(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every data source node with its section: of the run, of a mixture, and of additional validations."""
    yield "data", config["data"]
    for group in DATA_GROUPS:
        nodes = select(config, group)
        for name, node in nodes.items() if isinstance(nodes, Mapping) else ():
            if isinstance(node, Mapping) and isinstance(node.get("_target_"), str):
                yield f"{group}.{name}", node


def list_nodes(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every section with a `_target_`, before the sections in it, with its key.

    Args:
        config: Config or a section of it.
        path: Key of that section; empty for the root.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            here = f"{path}.{key}" if path else str(key)
            if isinstance(value.get("_target_"), str):
                yield here, value
            yield from list_nodes(value, here)
