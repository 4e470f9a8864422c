"""Adapters for parameter-efficient fine-tuning, injected by `peft` while the model is on the meta device."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, ClassVar, Protocol

from torch import nn

from recipes.blocks import list_adapted_blocks
from recipes.errors import ConfigError, type_extra, type_setting
from recipes.numerics.torchao_import import without_warnings_of_torchao

ALL = "all"
# substrings of the names of adapter parameters
MARKS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.", ".ia3_l.")


class Adapter(Protocol):
    """One option of conf/adapter."""

    def apply(self, model: nn.Module) -> None:
        """Freeze the model and add trainable weights, in place; it is on the meta device, before it is sharded."""


class NoAdapter:
    """Full fine-tuning: all weights are trained."""

    attaches: ClassVar[bool] = False

    def apply(self, model: nn.Module) -> None:
        """Change nothing."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name was added by an adapter."""
    return any(mark in name for mark in MARKS)


def is_factor(name: str) -> bool:
    """Return whether a parameter is an IA3 scaling vector, which is stored as [outputs, 1] or [1, inputs]."""
    return ".ia3_l" in name


def inject(model: nn.Module, config: Any, *, pretrained: str | None, modules_to_save: Sequence[str]) -> None:
    """Replace the target layers with peft's, and freeze what is neither in them nor to be saved beside them.

    Modules that are trained in full stay where they are, unlike in peft, which trains copies of them: their parameters
    have the names and the first values that they have without an adapter, and are in its checkpoints.

    Args:
        model: Model on the current device, usually the meta device, where the adapter is created too.
        config: peft config; names the modules to save afterwards.
        pretrained: peft folder with initial adapter weights; None: random initialization.
        modules_to_save: Ends of the names of modules that are trained in full.

    Raises:
        ConfigError: There is no such module, or it cannot be trained beside the adapter.
    """
    from peft import inject_adapter_in_model

    names = _find_modules_to_save(model, modules_to_save, targets=config.target_modules)
    trained = [weight for name in names for weight in model.get_submodule(name).parameters() if weight.requires_grad]
    with _made_where_it_stays():
        inject_adapter_in_model(config, model)
    for weight in trained:
        weight.requires_grad_(True)
    config.modules_to_save = names or None
    untyped: Any = model
    untyped.adapter_config, untyped.adapter_pretrained = config, pretrained


def _find_modules_to_save(model: nn.Module, wanted: Sequence[str], *, targets: Collection[str]) -> list[str]:
    """Return the full names of the modules to train in full, those within another one left out.

    Raises:
        ConfigError: There is none, it has adapted layers or is one, or it shares a weight with one that stays frozen.
    """
    parts = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters())}
    found: list[str] = []
    for end in wanted:
        own = [name for name in parts if f".{name}".endswith(f".{end}")]
        if not own:
            units = {name.removeprefix("inner.") for name in parts if name and not _is_within(name, targets)}
            near = get_close_matches(end, sorted(units), 3, 0.4) or sorted(units)[:3]
            title = getattr(model, "title", type(model).__name__)
            reason = f"no module of {title} with weights has a name that ends with {end}"
            raise ConfigError(f"adapter.modules_to_save=[{end}]", reason, f"adapter.modules_to_save=[{','.join(near)}]")
        found += own
    names = [name for name in dict.fromkeys(found) if not _is_within(name, {*found} - {name})]
    for name in names:
        adapted = sorted(each for each in targets if _is_within(each, [name]) or _is_within(name, [each]))
        if adapted:
            reason = f"{adapted[0].removeprefix('inner.')} is adapted, and its weights stay frozen"
            fix = "adapter.modules_to_save=[<modules without adapted layers>], or fewer adapter.target_modules"
            raise ConfigError(f"adapter.modules_to_save=[{name.removeprefix('inner.')}]", reason, fix)
    _check_ties(model, names)
    return names


def _check_ties(model: nn.Module, names: Sequence[str]) -> None:
    """Check that all modules that share a weight are named: peft would train a copy of one, and untie them.

    Raises:
        ConfigError: Another one is not.
    """
    saved = {weight for name in names for weight in model.get_submodule(name).parameters()}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight in saved and not _is_within(name, names):
            typed, other = (",".join(each.removeprefix("inner.") for each in names), name.rpartition(".")[0])
            reason = f"its weight is that of {other.removeprefix('inner.')}, too, which would change with it"
            fix = f"adapter.modules_to_save=[{typed},{other.removeprefix('inner.')}]"
            raise ConfigError(f"adapter.modules_to_save=[{typed}]", reason, fix)


def _is_within(name: str, modules: Collection[str]) -> bool:
    """Return whether a name is that of one of the modules, or of a part of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def list_trained_beside(model: nn.Module) -> set[str]:
    """Return all names of the parameters that are trained in full beside an adapter."""
    modules = getattr(getattr(model, "adapter_config", None), "modules_to_save", None) or []
    return {name for name, _ in model.named_parameters(remove_duplicate=False) if _is_within(name, modules)}


@contextmanager
def _made_where_it_stays() -> Iterator[None]:
    """Prevent peft (0.21) from moving modules to the device of their layer, where they already are.

    `mode=plan` builds the model of fake tensors, to which `Module.to` raises "Couldn't swap" (torch 2.13).
    """
    kind: Any = nn.Module
    inner, kind.to = kind.to, lambda self, *_, **__: self
    try:
        yield
    finally:
        kind.to = inner


def check_layers(model: nn.Module, pretrained: str | None) -> None:
    """Check that a peft folder can have the layers of a model: those of our own models are in no published one.

    Raises:
        ConfigError: It is a model of ours.
    """
    if pretrained is None or hasattr(model, "inner"):
        return
    own = getattr(model, "pretrained", None)
    named = type_setting("model.name", own) if own else "model.name=<the model it was trained with>"
    reason = f"an adapter of peft is for the layers of a published model, and {type(model).__name__} has others"
    fix = f"model=huggingface {named} model.max_seq_len={getattr(model, 'max_seq_len', '<number>')}"
    fix += ", without the other settings of model"
    raise ConfigError(f"adapter.pretrained={pretrained}", reason, fix)


def find_targets(model: nn.Module, wanted: Sequence[str] | str, *, setting: str) -> list[str]:
    """Return the full names of the linear layers to adapt.

    Args:
        model: Model with blocks.
        wanted: Name suffixes within a block, such as `q_proj` or `attention.qkv`; `all`: every linear layer in blocks.
        setting: Config key, for errors.

    Raises:
        ConfigError: The model has no blocks, or no layer with such a name.
    """
    check_peft()
    linear, title = list_targets(model), getattr(model, "title", type(model).__name__)
    if not linear:
        reason = f"{title} has no linear layer in its blocks, and these are adapted"
        raise ConfigError(setting, reason, "adapter=none")
    if not wanted:
        raise ConfigError(setting, "it names no layer", "adapter.target_modules=all, or adapter=none")
    if wanted == ALL:
        return linear
    ends = [wanted] if isinstance(wanted, str) else list(wanted)
    for end in ends:
        if not any(f".{name}".endswith(f".{end}") for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            reason = f"no linear layer of {title} has a name that ends with {end}"
            raise ConfigError(setting, reason, f"adapter.target_modules=[{','.join(known)}], or some of them")
    return [name for name in linear if any(f".{name}".endswith(f".{end}") for end in ends)]


def list_targets(model: nn.Module) -> list[str]:
    """Return the names of the linear layers in the blocks that an adapter adapts, with or without one.

    None of a model without blocks.
    """
    inside = {id(module) for block in list_adapted_blocks(model) for module in block.modules()}
    return [
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if id(module) in inside and _is_linear(module) and not is_adapter(f"{name}.")
    ]


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Let a model compute what it would without its adapter, with modules that are trained beside it as they are.

    peft's own `disable_adapter_layers` (0.21) also changes `requires_grad` of the adapter, and with it the gradients
    that an engine waits for.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def check_peft() -> None:
    """Check that peft is installed.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        with without_warnings_of_torchao():
            import peft  # noqa: F401
    except ImportError as error:
        reason = "adapters need the package peft, which is not installed"
        raise ConfigError("adapter=…", reason, f"{type_extra('peft')}, or adapter=none") from error


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's in transformers
