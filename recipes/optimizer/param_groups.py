"""Parameter groups: weight decay acts on matrices, never on biases and norms."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from recipes.adapter import is_factor
from recipes.errors import ConfigError
from recipes.model.init import unsharded_shape, without_wrappers
from recipes.parallel.placement import local


@runtime_checkable
class NamesUndecayed(Protocol):
    """A model with matrices or tables that weight decay leaves alone, such as position embeddings."""

    def names_without_decay(self) -> Collection[str]:
        """Return the names of these parameters."""


@runtime_checkable
class BoundsParameters(Protocol):
    """A model with parameters that stay within bounds, such as a scale of logits."""

    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """Return the least and the largest value of these parameters, by name."""


def decay_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into groups with and without weight decay.

    Matrices, embeddings and convolution kernels (two or more dimensions) are decayed; biases, norm gains and other
    vectors are not, because shrinking them toward zero does not reduce complexity; nor is what the model names
    (`NamesUndecayed`). A tied parameter is listed once.

    Args:
        model: Model, may be sharded: dimensions are counted on unsharded parameters.
        weight_decay: Weight decay of the matrices.

    Returns:
        Two groups with `params`, `weight_decay` and `group_name` (`decay`, `no_decay`). One of them may be empty, as
        that of the matrices of a pipeline stage may be, and both are empty where a stage is frozen; but every rank has
        the same groups: schedules and checkpoints go by their number.
    """
    trainable = [parameter for _, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = find_decayed(model)
    return [
        {
            "params": [parameter for parameter in trainable if parameter in decayed],
            "weight_decay": weight_decay,
            "group_name": "decay",
        },
        {
            "params": [parameter for parameter in trainable if parameter not in decayed],
            "weight_decay": 0.0,
            "group_name": "no_decay",
        },
    ]


def find_decayed(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that weight decay acts on: matrices, tables and kernels, but those that the model names.

    Decaying the scaling factors of an adapter toward zero would switch off the activations that they multiply.
    """
    named = model.names_without_decay() if isinstance(model, NamesUndecayed) else ()
    return {
        parameter
        for name, parameter in model.named_parameters()
        if len(unsharded_shape(parameter)) >= 2 and not is_factor(name) and without_wrappers(name) not in named
    }


def divide_bounded(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Give each trained parameter with bounds a group of its own, in place, where `hold_bounds` finds it.

    Engines lay the parameters of a group end to end and cut them into shards: alone in its group, it is found again.
    """
    if not isinstance(model, BoundsParameters):
        return
    parameters = {without_wrappers(name): parameter for name, parameter in model.named_parameters()}
    for name, bounds in model.bounds().items():
        bounded = parameters.get(name)
        if bounded is None or not bounded.requires_grad:
            continue
        group = next(each for each in optimizer.param_groups if any(bounded is other for other in each["params"]))
        group["params"] = [other for other in group["params"] if other is not bounded]
        optimizer.param_groups.append({**group, "params": [bounded], "group_name": name, "bounds": [*bounds]})


def hold_bounds(optimizer: torch.optim.Optimizer) -> None:
    """Clamp parameters with bounds after each step of an optimizer, as `divide_bounded` has left it."""
    if any("bounds" in group for group in optimizer.param_groups):
        optimizer.register_step_post_hook(_clamp)


@torch.no_grad()
def _clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if "bounds" in group:
            for parameter in group["params"]:  # the flat shard of an engine may be padded with zeros
                local(parameter).clamp_(*group["bounds"])


def drop_unused_groups(optimizer: torch.optim.Optimizer, *, used: Sequence[bool]) -> None:
    """Remove the groups that are empty on every rank, in place: DeepSpeed cannot partition an empty group.

    Args:
        optimizer: Optimizer before its first step.
        used: Whether any rank has a parameter in a group, for each group.
    """
    kept = [group for group, is_used in zip(optimizer.param_groups, used, strict=True) if is_used]
    optimizer.param_groups[:] = kept


def check_matrices(model: nn.Module, *, optimizer: str) -> None:
    """Reject a weight that stacks the matrices of several layers along an axis of its own, such as experts.

    For optimizers that treat a weight with two or more axes as one matrix. Kernels of convolutions are matrices with
    one row per output channel.

    Args:
        model: Model whose trainable parameters are optimized.
        optimizer: Name of the optimizer, for the message.

    Raises:
        ConfigError: There is such a weight.
    """
    kernels = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _ConvNd)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        shape = unsharded_shape(parameter)
        if parameter.requires_grad and id(parameter) not in kernels and sum(size > 1 for size in shape) > 2:
            raise ConfigError(
                f"optimizer={optimizer}",
                f"{name}, {list(shape)}, stacks matrices, such as those of all experts, and it would treat them as one",
                "optimizer=adamw",
            )
