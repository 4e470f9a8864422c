"""ZeRO-3 partitioning of a model described on the meta device: one unsharded parameter at a time in memory."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recipes.numerics.grouped_linear import GroupedLinear

ALIGNMENT = 1024  # elements; DeepSpeed needs an even number for NCCL
BUCKET_ELEMENTS = 200_000_000  # Lightning's default: 0.8 GB in float32, twice that if communication overlaps
# Elements of a rank's shard that are in host memory at a time while the optimizer steps, where a disk holds the rest:
# four page-locked buffers of this size, 1.6 GB in float32. DeepSpeed closes a group with the parameter that fills it.
DISK_SUB_GROUP = 100_000_000
DISK_THREADS = 4  # that share each read and write of the disk; one thread leaves an NVMe disk idle
Slots = list[tuple[nn.Module, str]]  # modules and attribute names under which one parameter is used


def fit_buckets(zero: dict[str, Any], model: nn.Module) -> None:
    """Limit communication buckets to an eighth of the model; larger ones would double a small model's gradients.

    Args:
        zero: `zero_optimization` of DeepSpeed's config, changed in place.
        model: On any device.
    """
    sizes = [parameter.numel() for parameter in model.parameters()]
    bucket = min(BUCKET_ELEMENTS, sum(sizes) // 8) // ALIGNMENT * ALIGNMENT
    zero |= dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), max(bucket, ALIGNMENT))
    if "offload_param" in zero:  # each buffer holds one parameter on its way to the disk
        zero["offload_param"]["buffer_size"] = -(-max(sizes) // ALIGNMENT) * ALIGNMENT


def partition(
    model: nn.Module,
    initialize: Callable[[nn.Module], None],
    *,
    config: Any,
    device: torch.device,
) -> None:
    """Create, fill and partition each parameter before the next one, in place.

    Args:
        model: On the meta device.
        initialize: Gives every parameter its values through the `fill_whole` that this sets on it.
        config: DeepSpeed's, with `zero_optimization`.
        device: Where each unsharded parameter is created, and where buffers stay.
    """
    import deepspeed

    zero_init = deepspeed.zero.Init(config_dict_or_path=config)
    # a tied weight has several slots: replacing one alone would untie it
    slots: dict[int, Slots] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            slots.setdefault(id(parameter), []).append((module, name))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
    for parameter in model.parameters():
        fill = functools.partial(_fill, zero_init, parameter, slots[id(parameter)], device)
        parameter.fill_whole = fill  # type: ignore[attr-defined]
    initialize(model)
    unset = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not unset, f"no initial weights for {unset}"


def gather_in_compute_dtype(blocks: Iterable[nn.Module], optimizer: Any, dtype: torch.dtype) -> None:
    """Gather the weights of linear layers in the dtype that autocast would cast them to: half the bytes, the same bits.

    What is sent is halved, not what is held: DeepSpeed casts the weights back when they have arrived. Gradients are
    reduced in float32 as before. DeepSpeed 0.19.8 has one attribute for both directions, `comm_dtype`, set by its
    `lower_precision_safe_modules`; here it is set for the gathering, and the optimizer is answered float32.

    Args:
        blocks: Whose linear layers run under autocast alone. Not the head: a tied one is an embedding as well, which
            autocast leaves in float32.
        optimizer: Of ZeRO-3.
        dtype: bfloat16 or float16.
    """
    for parameter in list_cast_weights(blocks):
        parameter.comm_dtype = dtype  # type: ignore[attr-defined]
    optimizer.get_param_comm_dtype = lambda parameter: torch.float32


def list_cast_weights(blocks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of the linear layers of blocks, which autocast casts before each product."""
    modules = (module for block in blocks for module in block.modules())
    cast = (module for module in modules if isinstance(module, nn.Linear | GroupedLinear))
    return [parameter for module in cast for parameter in module.parameters(recurse=False)]


@torch.no_grad()
def _fill(zero_init: Any, described: nn.Parameter, slots: Slots, device: torch.device, values: Tensor) -> None:
    """Replace a parameter on the meta device by one that holds only this rank's part of `values`."""
    values = values.to(device, described.dtype)  # shape of the unsharded parameter
    parameter = nn.Parameter(values, requires_grad=described.requires_grad)
    for module, name in slots:
        setattr(module, name, parameter)
    zero_init._convert_to_deepspeed_param(parameter)
    parameter.partition()  # type: ignore[attr-defined]
