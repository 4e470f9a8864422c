"""FLOPs of one micro-batch, counted on a copy without memory: nothing is computed, some 10 ms once a shape."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_flops(module: nn.Module, batch: Any) -> float:
    """FLOPs of the forward and backward pass: three times those of the matrix products and convolutions forward.

    A module may offer `forward_on_meta(batch)`, its forward pass on the meta device; else a copy of the module does
    its `training_step`. Attention counts in full, whatever its mask; recomputation does not count.

    Args:
        module: Whole and with plain parameters, on any device; it stays as it is.
        batch: As `training_step` takes it.

    Raises:
        Exception: Whatever the module raises where a value is asked of a tensor that has none.
    """
    batch = _on_meta(batch)
    own = getattr(module, "forward_on_meta", None)
    # the fused kernels of attention are counted as nothing on some devices (pytorch #195460, 2.13)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        if callable(own):
            own(batch)
        else:
            _meta_copy(module).training_step(batch, 0)  # type: ignore[operator]
    return 3.0 * float(counter.get_total_flops())


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """What decides the FLOPs of a batch: the shapes of its tensors."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return tuple(shapes_of(one) for one in batch)
    return ()


def _meta_copy(module: nn.Module) -> nn.Module:
    """The module with parameters of the same shapes and no values; it has the same trainer and logs nothing."""
    memo: dict[int, Any] = {
        id(tensor): _like(tensor) for tensor in (*module.parameters(), *module.buffers())
    }
    shared = [vars(module)[name] for name in ("_trainer", "_fabric") if name in vars(module)]
    memo |= {id(one): one for one in shared if one is not None}
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
    if isinstance(batch, (list, tuple)):
        return (
            type(batch)(_on_meta(one) for one in batch) if type(batch) in (list, tuple) else batch
        )
    return batch
