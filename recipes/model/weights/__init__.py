"""Initialize model weights randomly from the seed, or load published weights."""

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from recipes.adapter import list_trained_beside
from recipes.adapter.nf4_base import unquantize
from recipes.blocks import apart
from recipes.errors import ConfigError
from recipes.model import as_model
from recipes.model.init import constant_, named_parameters
from recipes.model.projection import init_projection, without_projection
from recipes.model.score import OF_HEADS, init_heads
from recipes.model.weights.adapter import has_adapter, initialize_adapter
from recipes.numerics.nf4 import dequantize, is_nf4
from recipes.parallel.placement import local
from recipes.runtime.own_code import is_own


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Set the initial weights: those of another run, of `model.pretrained` if it is set, else `init_weights(seed)`.

    Call after `to_empty`, on the device of the run, sharded or not. No collectives: every rank loads or initializes one
    unsharded parameter at a time and keeps its own shard.

    Args:
        model: Model with allocated but uninitialized storage.
        seed: Seed of the run.

    Raises:
        ConfigError: The model lacks a method that resuming calls.
        ValueError: The weights at `model.pretrained` do not fit the model; nothing was loaded.
    """
    name = type(model).__name__
    if not hasattr(model, "init_weights") and getattr(model, "pretrained", None) is None:
        raise ConfigError(
            f"model._target_={type(model).__module__}.{name}",
            f"{name} has no init_weights(seed), and its weights are allocated after its constructor has run",
            "def init_weights(self, seed): in that class, which sets every parameter, as in docs/guides/own_data.md",
        )
    if not hasattr(model, "init_buffers"):
        raise ConfigError(
            f"model._target_={type(model).__module__}.{name}",
            f"{name} has no init_buffers(), which a resume calls to set what a checkpoint does not hold",
            "def init_buffers(self): in that class, empty if there are no such buffers",
        )
    with apart(model) as beside:
        _initialize(model, seed)
    if beside is not None:  # with the weights of the policy, wherever they come from; the values themselves begin at 0
        init_heads(model, seed=seed)
        _share_first_weights(model, beside)
        _initialize(beside, seed)


def _initialize(model: nn.Module, seed: int) -> None:
    init_heads(model, seed=seed)  # first: published weights have none, and those of another run may have
    first_weights: FirstWeights | None = getattr(model, "first_weights", None)
    if first_weights is None:
        init_projection(model, seed=seed)
        with without_projection(model):
            _initialize_base(model, seed)
    else:  # another run may have a projection
        _initialize_base(model, seed)
    if has_adapter(model) and not (first_weights is not None and first_weights.load_adapter(model)):
        initialize_adapter(model, seed)


def _share_first_weights(model: Any, beside: Any) -> None:
    if (first_weights := getattr(model, "first_weights", None)) is not None:
        beside.first_weights = first_weights


class FirstWeights(Protocol):
    """Weights of another run, which a model may have as its attribute `first_weights`."""

    def load_base(self, model: nn.Module, seed: int) -> None:
        """Fill every parameter that is not an adapter's, and every buffer."""

    def load_adapter(self, model: nn.Module) -> bool:
        """Fill the adapter; return whether there was one to fill it from."""


def _initialize_base(model: nn.Module, seed: int) -> None:
    first_weights: FirstWeights | None = getattr(model, "first_weights", None)
    if first_weights is not None:
        first_weights.load_base(model, seed)
        return
    pretrained: str | None = getattr(model, "pretrained", None)
    if pretrained is None and (own := _find_own_class(model)) is not None:
        _initialize_own(model, own, seed)
    elif pretrained is None:
        as_model(model).init_weights(seed)
    else:
        load_published(model, pretrained, seed=seed)


def _find_own_class(model: nn.Module) -> type | None:
    """Return the class of a model if it is somebody's own: FSDP2 has derived another one from it."""
    files = {cls: getattr(sys.modules.get(cls.__module__), "__file__", None) for cls in type(model).__mro__}
    return next((cls for cls, file in files.items() if file is not None and is_own(file)), None)


def _initialize_own(model: Any, own: type, seed: int) -> None:
    """Call the `init_weights` of somebody's own class, and find what it leaves as it was allocated.

    Raises:
        ConfigError: It takes no seed, or sets not every parameter.
    """
    setting, fix = f"model._target_={own.__module__}.{own.__name__}", "def init_weights(self, seed): in that class"
    try:
        inspect.signature(model.init_weights).bind(seed)
    except TypeError as error:
        reason = "its init_weights takes no seed alone, from which every rank and engine sets the same weights"
        raise ConfigError(setting, reason, f"{fix}, with init.normal_(parameter, name=…, seed=seed, std=…)") from error
    plain = {
        key
        for key, weight in named_parameters(model)
        if key not in OF_HEADS
        and weight.is_floating_point()
        and not hasattr(weight, "fill_whole")
        and not is_nf4(weight)
    }
    for key, weight in named_parameters(model):
        if key in plain:
            constant_(weight, math.nan)
    model.init_weights(seed)
    unset = [key for key, weight in named_parameters(model) if key in plain and local(weight).isnan().any()]
    if unset:
        more = f" and {len(unset) - 1} more" if len(unset) > 1 else ""
        raise ConfigError(
            setting,
            f"its init_weights does not set {unset[0]}{more}, whose memory holds whatever was there",
            f"{fix}, which sets every one of self.named_parameters()",
        )


@torch.no_grad()
def restore_precision(model: nn.Module, seed: int) -> float | None:
    """Replace frozen NF4 weights in place with the weights they were quantized from.

    Args:
        model: Unsharded model.
        seed: Seed of the run.

    Returns:
        Relative quantization error (2-norm) over all NF4 weights; None if there are none.
    """
    restored = unquantize(model)
    if not restored:
        return None
    beside = list_trained_beside(model)
    learned = {name: weight.clone() for name, weight in model.named_parameters() if name in beside}
    _initialize_base(model, seed)
    for name, values in learned.items():
        model.get_parameter(name).copy_(values)
    squares = torch.zeros(2, dtype=torch.float64)  # squared norms: differences, weights
    for layer, rounded in restored:
        whole = layer.weight.float()  # [M, K]
        for index, values in enumerate((dequantize(rounded) - whole, whole)):
            squares[index] += torch.linalg.vector_norm(values, dtype=torch.float64).square().cpu()
    return math.sqrt(squares[0] / squares[1])


def load_published(model: nn.Module, pretrained: str, *, seed: int = 0) -> None:
    """Fill every parameter and buffer from published weights; the seed is that of a new head."""
    # lazy: only runs that load published weights pay for importing safetensors
    from recipes.model.weights import huggingface, llava_parts, timm_folder, torchvision

    load: dict[str, Callable[[Any, str], None]] = {
        "huggingface": huggingface.load_pretrained,
        "image_tower": functools.partial(timm_folder.load_tower, seed=seed),
        "llava": functools.partial(llava_parts.load, seed=seed),
        "timm": functools.partial(timm_folder.load_pretrained, seed=seed),
        "torchvision": torchvision.load_pretrained,
    }
    load[getattr(model, "published_format", "huggingface")](model, pretrained)


@torch.no_grad()
def await_checkpoint(model: nn.Module, seed: int) -> None:
    """Initialize buffers and fill every parameter with NaN, which exposes parameters missing from the checkpoint.

    Random initialization on every rank takes a minute or more for 8e9 parameters (2 s for 124M, `recipes.model.init`).
    An adapter checkpoint does not contain the base weights, which are loaded or initialized as usual.

    Args:
        model: Same as for `initialize`.
        seed: Seed of the run.
    """
    if has_adapter(model):
        initialize(model, seed)
        return
    with apart(model) as beside:
        as_model(model).init_buffers()
    if beside is not None:
        as_model(beside).init_buffers()
    for parameter in list(model.parameters()):  # a list: setting a parameter may replace it in the model
        constant_(parameter, math.nan)
