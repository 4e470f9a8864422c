"""Count the FLOPs of one micro-batch on the meta device: nothing is computed, 10 to 100 ms per shape."""

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
    """Return the FLOPs of the matmuls and convolutions that torch runs in a forward and a backward pass.

    A module may provide `forward_on_meta(batch)`, the outputs of its forward pass on the meta device. Otherwise a
    copy of the module runs its `training_step`, collectives included: do not call this for one of several ranks.
    Attention counts in full, whatever its mask; recomputation does not count. Random states are restored.

    Args:
        module: With unsharded parameters, on any device; it is not changed.
        batch: As `training_step` takes it.

    Raises:
        Exception: Whatever the module raises when it reads a value from a tensor on the meta device.
    """
    batch = _on_meta(batch)
    own = getattr(module, "forward_on_meta", None)
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = list(range(torch.cuda.device_count())) if has_cuda else []
    # fused attention kernels count as zero on some devices (pytorch #195460, 2.13)
    with (
        torch.random.fork_rng(cuda),
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        outputs = own(batch) if callable(own) else _run_step(_meta_copy(module), batch)
        if isinstance(outputs, Mapping):
            outputs = outputs["loss"]
        outputs.float().sum().backward()
    return float(counter.get_total_flops())


def get_shapes(batch: Any) -> tuple[Any, ...]:
    """Return the shapes of a batch's tensors, which determine its FLOPs; () if it has none."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = list(vars(batch).values())
    if isinstance(batch, (list, tuple)):
        return tuple(get_shapes(item) for item in batch)
    return ()


def _run_step(module: nn.Module, batch: Any) -> Any:
    step: Any = module.training_step
    takes_index = len(inspect.signature(step).parameters) > 1
    return step(batch, 0) if takes_index else step(batch)


def _meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy with parameters of the same shapes on the meta device, which logs nothing."""
    memo: dict[int, Any] = {id(tensor): _empty_like(tensor) for tensor in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, memo).train(module.training)
    vars(copied).update(dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
    return copied


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # the shape of `tensor`
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _on_meta(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach().to("meta")
    if isinstance(batch, dict):
        return {name: _on_meta(item) for name, item in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_on_meta(item) for item in batch)
    return batch
