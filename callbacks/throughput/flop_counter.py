"""FLOPs of one micro-batch, counted on a copy without memory: nothing is computed, some 10 to 100 ms a shape."""

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_flops(module: nn.Module, batch: Any) -> float:
    """FLOPs of the matrix products and convolutions of a forward and a backward pass, as torch makes them.

    A module may offer `forward_on_meta(batch)`, the outputs of its forward pass on the meta device; else a copy of the
    module does its `training_step`, and its collectives, if it has any: not for one of several ranks. Attention
    counts in full, whatever its mask; recomputation does not count. Random states stay as they are.

    Args:
        module: With plain parameters, on any device; it stays as it is.
        batch: As `training_step` takes it.

    Raises:
        Exception: Whatever the module raises where a value is asked of a tensor that has none.
    """
    batch = _on_meta(batch)
    own = getattr(module, "forward_on_meta", None)
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = list(range(torch.cuda.device_count())) if has_cuda else []
    # the fused kernels of attention are counted as nothing on some devices (pytorch #195460, 2.13)
    with (
        torch.random.fork_rng(cuda),
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        outputs = own(batch) if callable(own) else _step(_meta_copy(module), batch)
        if isinstance(outputs, Mapping):
            outputs = outputs["loss"]
        outputs.float().sum().backward()
    return float(counter.get_total_flops())


def get_shapes(batch: Any) -> tuple[Any, ...]:
    """What decides the FLOPs of a batch: the shapes of its tensors; () where none is found."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = list(vars(batch).values())
    if isinstance(batch, (list, tuple)):
        return tuple(get_shapes(one) for one in batch)
    return ()


def _step(module: nn.Module, batch: Any) -> Any:
    step: Any = module.training_step
    takes_index = len(inspect.signature(step).parameters) > 1
    return step(batch, 0) if takes_index else step(batch)


def _meta_copy(module: nn.Module) -> nn.Module:
    """The module with parameters of the same shapes and no values, which logs nothing and has no trainer."""
    memo: dict[int, Any] = {
        id(tensor): _like(tensor) for tensor in (*module.parameters(), *module.buffers())
    }
    copied = copy.deepcopy(module, memo).train(module.training)
    vars(copied).update(dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
    return copied


def _like(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _on_meta(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach().to("meta")
    if isinstance(batch, dict):
        return {name: _on_meta(one) for name, one in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_on_meta(one) for one in batch)
    return batch
