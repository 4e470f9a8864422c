"""Strategies: small subclasses of Lightning's strategies that implement `recipes.engine.Engine`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.blocks import list_blocks, named_blocks
from recipes.errors import ConfigError
from recipes.lightning_internals import unwrap_optimizer


def get_blocks(model: nn.Module, option: str) -> list[nn.Module]:
    """Return the blocks of a model, in order, which a strategy shards one by one.

    Args:
        model: Any model.
        option: Name of the strategy's option, for the error message.

    Raises:
        ConfigError: The model has no `blocks`: sharded as one unit, every rank would gather all of it at once.
    """
    if not named_blocks(model):
        raise ConfigError(
            f"strategy={option}",
            f"it shards block by block, and {type(model).__name__} has no `blocks`",
            "strategy=ddp",
        )
    return list_blocks(model)


def skip_step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], skips: Tensor) -> None:
    """Make the next step of an optimizer a no-op where a 0-dim bool tensor is true.

    A fused optimizer with parameters on a GPU reads the flag on the device. For any other optimizer the flag is read on
    the host and the gradients are dropped; the read is free on a CPU and synchronizes once with a GPU.
    """
    # `found_inf` must be set on torch's optimizer: on Lightning's wrapper the fused kernel would not see it
    inner: Any = unwrap_optimizer(optimizer)
    parameters = list(parameters)
    is_fused = all(group.get("fused") for group in inner.param_groups)
    # where the kernel runs: under FSDP with offload the norm, and so the flag, is on the GPU and the weights are on the
    # host, to which torch's optimizers copy the flag without synchronizing
    device = get_local_device(parameters)
    # without state the first step creates it even when skipped, so it must not run at all
    if device.type == "cuda" and is_fused and inner.state:
        inner.found_inf = skips.to(device, torch.float32)
        return
    inner.found_inf = None  # may be left from an earlier step: a rollback to before the first step leaves no state
    if bool(skips):
        for parameter in parameters:
            parameter.grad = None


def get_local_device(parameters: Iterable[nn.Parameter]) -> torch.device:
    """Return the device of this rank's parameters or shards: the host under FSDP with offload."""
    parameter = next(iter(parameters))
    return parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
