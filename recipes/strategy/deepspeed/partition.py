"""ZeRO-3 partitioning of a model from the meta device, with one unsharded parameter in memory at a time."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recipes.compile import is_compiled
from recipes.model.init import fill_through
from recipes.numerics.grouped_linear import GroupedLinear

ALIGNMENT = 1024  # elements; DeepSpeed needs an even number for NCCL
BUCKET_ELEMENTS = 200_000_000  # Lightning's default: 0.8 GB in float32, twice that with overlapped communication
# Elements of a rank's shard in host memory at a time during the optimizer step, with the rest on disk: four
# page-locked buffers of this size, 1.6 GB in float32. DeepSpeed closes a group with the parameter that fills it.
DISK_SUB_GROUP = 100_000_000
DISK_THREADS = 4  # per disk read or write; a single thread leaves an NVMe disk idle
_GENERATION = -1  # in the place of the number of a module, which begin at 0
Slots = list[tuple[nn.Module, str]]  # modules and attribute names under which one parameter is used


def fit_buckets(zero: dict[str, Any], model: nn.Module) -> None:
    """Limit communication buckets to an eighth of the model; the default would double a small model's gradient memory.

    Args:
        zero: `zero_optimization` section of DeepSpeed's config; modified in place.
        model: Model on any device.
    """
    sizes = [parameter.numel() for parameter in model.parameters()]
    bucket = min(BUCKET_ELEMENTS, sum(sizes) // 8) // ALIGNMENT * ALIGNMENT
    zero |= dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), max(bucket, ALIGNMENT))
    if "offload_param" in zero:  # each buffer holds one parameter on its way to or from disk
        zero["offload_param"]["buffer_size"] = -(-max(sizes) // ALIGNMENT) * ALIGNMENT


def partition(
    model: nn.Module,
    initialize: Callable[[nn.Module], None],
    *,
    config: Any,
    device: torch.device,
) -> None:
    """Create, fill and partition the parameters in place, one at a time.

    Args:
        model: Model on the meta device.
        initialize: Initializes every parameter through the `fill_whole` attribute that this function sets.
        config: DeepSpeed's config, with `zero_optimization`.
        device: Device on which each unsharded parameter is created and buffers stay.
    """
    import deepspeed

    zero_init = deepspeed.zero.Init(config_dict_or_path=config)
    # a tied weight has several slots; replacing only one would untie it
    slots: dict[int, Slots] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            slots.setdefault(id(parameter), []).append((module, name))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
    for parameter in model.parameters():
        fill = functools.partial(_fill, zero_init, parameter, slots[id(parameter)], device)
        fill_through(parameter, fill)
    initialize(model)
    unset = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not unset, f"no initial weights for {unset}"


def gather_whole(blocks: Iterable[nn.Module]) -> None:
    """Gather and free the weights of a compiled block together, as FSDP2 does, before and after its graph.

    DeepSpeed's hooks around every layer would break the graph at each of them, and torch would compile each layer of
    each block separately, up to its limit and then no more.
    """
    from deepspeed.utils import set_z3_leaf_module

    for block in blocks:
        if is_compiled(block):
            set_z3_leaf_module(block, True)


def gather_where_read(model: Any) -> None:
    """Gather weights where a model reads them outside of the forward pass of the module that has them.

    Some modules of transformers and torch read weights of their children, or the shapes of these: a model lists them as
    `modules_reading_children()`, whose weights are gathered together. Others are read by the model itself, which lists
    them as `weights_read_outside()`.

    Args:
        model: Partitioned model.
    """
    from deepspeed.runtime.zero import register_external_parameter
    from deepspeed.utils import set_z3_leaf_module

    for module in getattr(model, "modules_reading_children", list)():
        set_z3_leaf_module(module, True)
    for weight in getattr(model, "weights_read_outside", list)():
        register_external_parameter(model, weight)


def gather_in_compute_dtype(blocks: Iterable[nn.Module], optimizer: Any, dtype: torch.dtype) -> None:
    """All-gather the weights of linear layers in autocast's dtype: half the traffic, identical results.

    Memory is not halved: DeepSpeed casts the gathered weights back. Gradients are still reduced in float32.
    DeepSpeed 0.19.8 has one attribute for both directions, `comm_dtype`, set by its `lower_precision_safe_modules`;
    here it applies only to the all-gather, and the optimizer sees float32.

    Args:
        blocks: Blocks whose linear layers run only under autocast. The head is excluded: if tied, it is also an
            embedding, which autocast leaves in float32.
        optimizer: DeepSpeed's optimizer at stage 3.
        dtype: Autocast dtype, bfloat16 or float16.
    """
    weights: list[Any] = [*list_cast_weights(blocks)]
    for weight in weights:
        weight.comm_dtype = dtype
    optimizer.get_param_comm_dtype = lambda parameter: torch.float32


@contextmanager
def keep_gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gather all weights now and free them at the end, whatever forward passes run in between. A collective.

    DeepSpeed 0.19.8's hooks free a weight after a layer unless another layer uses it; here one more use is noted.
    """
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    weights: list[Any] = list(parameters)
    # small ones stay gathered between steps, and would be freed after a forward pass outside of the trace of a step
    shards = [weight for weight in weights if weight.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(shards, modifier_rank=None, enabled=bool(shards)):
        try:
            for weight in weights:
                weight.ds_active_sub_modules.add(_GENERATION)
            yield
        finally:
            for weight in weights:
                weight.ds_active_sub_modules.discard(_GENERATION)


def list_cast_weights(blocks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of the blocks' linear layers, which autocast casts before each matmul."""
    modules = (module for block in blocks for module in block.modules())
    cast = (module for module in modules if isinstance(module, nn.Linear | GroupedLinear))
    return [parameter for module in cast for parameter in module.parameters(recurse=False)]


@torch.no_grad()
def _fill(zero_init: Any, described: nn.Parameter, slots: Slots, device: torch.device, values: Tensor) -> None:
    """Replace a parameter on the meta device with this rank's shard of `values`."""
    values = values.to(device, described.dtype)  # shape of the unsharded parameter
    parameter: Any = nn.Parameter(values, requires_grad=described.requires_grad)
    for module, name in slots:
        setattr(module, name, parameter)
    zero_init._convert_to_deepspeed_param(parameter)
    parameter.partition()
