"""Adapters for parameter-efficient fine-tuning, injected by `peft` while the model is on the meta device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from torch import nn

from recipes.blocks import list_blocks
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


def inject(model: nn.Module, config: Any, *, pretrained: str | None) -> None:
    """Replace the target layers with peft's.

    Args:
        model: Model on the current device, usually the meta device, where the adapter is created too.
        config: peft config.
        pretrained: peft folder with initial adapter weights; None: random initialization.
    """
    from peft import inject_adapter_in_model

    with _made_where_it_stays():
        inject_adapter_in_model(config, model)
    untyped: Any = model
    untyped.adapter_config, untyped.adapter_pretrained = config, pretrained


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
    """Return the names of the linear layers in the blocks, with or without an adapter; empty without blocks."""
    inside = {id(module) for block in list_blocks(model) for module in block.modules()}
    return [
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if id(module) in inside and _is_linear(module) and not is_adapter(f"{name}.")
    ]


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Let a model compute what it would without its adapter.

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
