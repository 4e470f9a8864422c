"""Read the traits of the chosen mode and strategy from constants in their source, without importing them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.config.signature import find_signature, read_signature
from recipes.runtime.world import num_gpus

_FIT = "recipes.mode.fit.fit"
_PLAN = "recipes.mode.plan.plan"
# modes that train as the run would, on its ranks and under its strategy, but create no run
_TRIALS = frozenset(
    {
        "recipes.mode.batch_find.try_size",
        "recipes.mode.lr_find.lr_find",
        "recipes.mode.noise_scale.noise_scale",
        "recipes.mode.preflight.preflight",
    }
)


DATA_GROUPS = ("data.sources", "eval_data")  # sections of named nodes, each an option of data


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

    @property
    def typed(self) -> str:
        """Return the override that selects the strategy."""
        return f"strategy={self.option}"


def get_traits(strategy: Mapping[str, Any]) -> StrategyTraits:
    """Read the traits of a strategy's config node; ZeRO shards the weights from stage 3 on."""
    target = str(strategy["_target_"])
    declared: dict[str, Any] = {"option": target.rpartition(".")[2]}
    names = StrategyTraits.__dataclass_fields__
    declared |= {name: value for name, value in find_signature(target).constants.items() if name in names}
    if "stage" in strategy:
        declared["option"] = declared["option"].format(stage=strategy["stage"])
        declared["shards_weights"] = strategy["stage"] == 3
    return StrategyTraits(**declared)


def get_compile_mode(config: Mapping[str, Any], *, on_gpu: bool | None = None) -> str | None:
    """Return the torch.compile mode of a run; None is eager.

    `auto` compiles on a GPU, except under ZeRO-3, where gathering whole blocks has been tried on CPUs only.

    Args:
        config: Composed config.
        on_gpu: Whether the run has a GPU; None detects whether this machine has one that the Trainer may use.
    """
    setting = config["compile"]
    if setting == "auto":
        if on_gpu is None:
            on_gpu = config["trainer"].get("accelerator") != "cpu" and num_gpus() > 0
        setting = on_gpu and config["strategy"].get("stage") != 3
    if isinstance(setting, bool):
        return "default" if setting else None
    return str(setting)


def get_eval_samples(config: Mapping[str, Any]) -> int | None:
    """Return the number of validation samples; None is all.

    `auto` limits validation to 2 % of a run's time. Without its backward pass a sample takes a third of the time, so
    this is 6 % of the samples trained on between two validations, and at least one global batch.

    Args:
        config: Composed config.
    """
    chosen: int | str | None = config["eval_samples"]
    if not isinstance(chosen, str):
        return chosen
    batch_size = int(config["global_batch_size"])
    return max(6 * int(config["eval_every"]) * batch_size // 100, batch_size)


def tries_convolutions(config: Mapping[str, Any]) -> bool:
    """Return whether to enable cuDNN benchmarking: as set, else for images (fixed size), unless deterministic."""
    typed: bool | None = config["trainer"].get("benchmark")
    if typed is not None:
        return typed
    has_images = read_signature(config["task"]["_target_"]).constants.get("input_kind") == "images"
    return has_images and not config["trainer"].get("deterministic")


def get_tokens_per_sample(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of every training sample; None if the samples are not text, or are padded, by unknown numbers.

    Args:
        config: Composed config.
    """
    nodes = [node for place, node in list_data(config) if not place.startswith("eval_data.")]
    is_padded = any(find_signature(node["_target_"]).constants.get("pads_samples") for node in nodes)
    return None if is_padded or config["seq_len"] is None else int(config["seq_len"])


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


def runs_elsewhere(config: Mapping[str, Any]) -> bool:
    """Return whether the launcher runs on other machines, whose GPUs are unknown here."""
    return find_signature(select(config, "launcher._target_")).constants.get("runs_elsewhere") is True


def trains(config: Mapping[str, Any]) -> bool:
    """Return whether a composed config trains, in a run folder of its own."""
    return bool(config["mode"]["_target_"] == _FIT)


def takes_steps(config: Mapping[str, Any]) -> bool:
    """Return whether a composed config takes optimizer steps, as a run or as a trial of one, on all of its ranks.

    Every other mode runs once, on one device.
    """
    return trains(config) or config["mode"]["_target_"] in _TRIALS


def plans_steps(config: Mapping[str, Any]) -> bool:
    """Return whether a composed config plans the steps of a run, under the run's strategy, without taking any."""
    return bool(config["mode"]["_target_"] == _PLAN)
