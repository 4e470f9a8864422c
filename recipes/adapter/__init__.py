"""Few weights that are trained beside frozen ones: `adapter=`, injected by `peft` while the model has no storage."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from recipes.errors import ConfigError
from recipes.numerics.torchao_import import without_warnings_of_torchao

ALL = "all"
# parts of the names of an adapter's own parameters
MARKS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.", ".ia3_l.")


class Adapter(Protocol):
    """One option of conf/adapter."""

    def apply(self, model: nn.Module) -> None:
        """Freeze the model and add trainable weights, in place; it is on the meta device, before it is sharded."""


class NoAdapter:
    """All weights are trained."""

    def apply(self, model: nn.Module) -> None:
        """Change nothing."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name was added by an adapter."""
    return any(mark in name for mark in MARKS)


def is_factor(name: str) -> bool:
    """Return whether a parameter multiplies activations (IA3): kept as [outputs, 1] or [1, inputs], but no matrix."""
    return ".ia3_l." in name


def inject(model: nn.Module, config: Any, *, pretrained: str | None) -> None:
    """Let peft replace the chosen layers.

    Args:
        model: Made on the current device, where the adapter is made too: the meta device, as a rule.
        config: Of peft.
        pretrained: Folder of peft that its first weights come from; None: they are drawn.
    """
    from peft import inject_adapter_in_model

    with _made_where_it_stays():
        inject_adapter_in_model(config, model)
    model.adapter_config = config  # type: ignore[assignment]
    model.adapter_pretrained = pretrained  # type: ignore[assignment]


@contextmanager
def _made_where_it_stays() -> Iterator[None]:
    """Keep peft (0.21) from moving modules to the device of their layer, where they are already.

    `mode=plan` builds the model of fake tensors, to which `Module.to` raises "Couldn't swap" (torch 2.13).
    """
    inner = nn.Module.to
    nn.Module.to = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = inner  # type: ignore[method-assign]


def find_targets(model: nn.Module, wanted: Sequence[str] | str, *, setting: str) -> list[str]:
    """Return the full names of the linear layers that are adapted.

    Args:
        model: With `blocks`.
        wanted: Ends of names within a block, such as `q_proj` or `attention.qkv`; `all`: every linear layer there.
        setting: Where they were typed, for errors.

    Raises:
        ConfigError: The model has no blocks, or no layer of such a name.
    """
    check_peft()
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        reason = f"{type(model).__name__} has no blocks, whose linear layers are adapted"
        raise ConfigError(setting, reason, "adapter=none")
    inside = {id(module) for module in blocks.modules()}
    linear = [name for name, module in model.named_modules() if id(module) in inside and _is_linear(module)]
    if wanted == ALL:
        return linear
    ends = [wanted] if isinstance(wanted, str) else list(wanted)
    for end in ends:
        if not any(f".{name}".endswith(f".{end}") for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            reason = f"no linear layer of {type(model).__name__} has a name that ends with {end}"
            raise ConfigError(setting, reason, f"adapter.target_modules=[{','.join(known)}], or some of them")
    return [name for name in linear if any(f".{name}".endswith(f".{end}") for end in ends)]


def check_peft() -> None:
    """Check that peft is installed.

    Raises:
        ConfigError: It is not.
    """
    try:
        with without_warnings_of_torchao():
            import peft  # noqa: F401
    except ImportError as error:
        reason = "adapters need the package peft, which is not installed"
        raise ConfigError("adapter=…", reason, "pip install -e '.[peft]', or adapter=none") from error


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's in transformers
