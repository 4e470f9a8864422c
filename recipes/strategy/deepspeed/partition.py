"""ZeRO-3's division of a model described on the meta device: one whole parameter at a time in memory."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 1024  # elements; DeepSpeed wants an even number for NCCL
BUCKET_ELEMENTS = (
    200_000_000  # Lightning's default: 0.8 GB in float32, twice where communication overlaps
)
Slots = list[tuple[nn.Module, str]]


def fit_buckets(zero: dict[str, Any], model: nn.Module) -> None:
    """At most an eighth of the model: a bucket as large as a small model would double its gradients.

    Args:
        zero: `zero_optimization` of DeepSpeed's config, changed in place.
        model: On any device.
    """
    sizes = [parameter.numel() for parameter in model.parameters()]
    bucket = min(BUCKET_ELEMENTS, sum(sizes) // 8) // ALIGNMENT * ALIGNMENT
    zero |= dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), max(bucket, ALIGNMENT))
    if "offload_param" in zero:  # each of its buffers takes one parameter on its way to the disk
        zero["offload_param"]["buffer_size"] = -(-max(sizes) // ALIGNMENT) * ALIGNMENT


def partition(
    model: nn.Module,
    initialize: Callable[[nn.Module], None],
    *,
    config: Any,
    device: torch.device,
) -> None:
    """Make, fill and divide each parameter before the next one, in place.

    Args:
        model: On the meta device.
        initialize: Gives every parameter its values through its `fill_whole`.
        config: DeepSpeed's, with `zero_optimization`.
        device: Where the whole of a parameter is made, and buffers stay.
    """
    import deepspeed

    divide = deepspeed.zero.Init(config_dict_or_path=config)
    slots: dict[int, Slots] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            slots.setdefault(id(parameter), []).append((module, name))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
    for parameter in model.parameters():
        fill = functools.partial(_fill, divide, parameter, slots[id(parameter)], device)
        parameter.fill_whole = fill  # type: ignore[attr-defined]
    initialize(model)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"no first weights for {left}"


@torch.no_grad()
def _fill(
    divide: Any, described: nn.Parameter, slots: Slots, device: torch.device, values: Tensor
) -> None:
    """Put a real parameter, which keeps only this rank's part of `values`, in the place of a described one."""
    values = values.to(device, described.dtype)
    real = nn.Parameter(values, requires_grad=described.requires_grad)
    for module, name in slots:
        setattr(module, name, real)
    divide._convert_to_deepspeed_param(real)
    real.partition()  # type: ignore[attr-defined]
