"""Count the FLOPs of a micro-batch during its own training step, or on a meta-device copy of the model.

The training step never runs twice, so counting has no side effects on RNG states, logged values or replay buffers.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.random import fork_rng
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from ..protocols import SupportsMetaForward

_aten = torch.ops.aten


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of matmuls, convolutions and attention while active; costs microseconds per operator.

    Attention is counted in full regardless of its mask; recomputed activations are not counted.

    Attributes:
        flops: FLOPs counted so far.
        error: Reason why the count is invalid; None if it is valid.
    """

    supports_higher_order_operators = True  # flex attention, activation checkpoints

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: float = 0.0
        self.error: str | None = None

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        # otherwise torch.compile would run this batch uncompiled, with different rounding errors
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operator = getattr(func, "_overloadpacket", func)
        formula = _CPU_ATTENTION.get(operator) or flop_registry.get(operator)
        if formula is not None and not _is_recomputing():
            try:
                self.flops += float(formula(*args, **kwargs, out_val=result))
            except Exception as error:  # a formula that cannot handle these arguments must not end the run
                self.error = f"{type(error).__name__} in the formula of {operator}"
        return result


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _sdpa_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


# torch's registry has no formula for the CPU attention kernels and counts them as zero (pytorch #195460, 2.13)
_CPU_ATTENTION: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
}


def _is_recomputing() -> bool:
    """Return whether a backward pass is recomputing activations: a forward pass within it from a checkpoint.py."""
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return False
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if "checkpoint" in frame.f_code.co_filename.rpartition("/")[2]:
            return True
    return False


def is_compiled(loss: Tensor) -> bool:
    """Return whether part of a loss was computed by compiled code, whose operators the counter cannot see."""
    seen = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CompiledFunctionBackward":
            return True
        nodes.extend(parent for parent, _ in node.next_functions)
    return False


def count_flops_on_meta(module: SupportsMetaForward, batch: Any) -> float:
    """Return the FLOPs of a forward and backward pass of `recipes_forward_on_meta`; takes 10 to 100 ms.

    Attention is counted in full regardless of its mask; recomputation is not counted. RNG states are restored.

    Args:
        module: Provides the outputs of its forward pass on the meta device.
        batch: A batch as passed to `training_step`.

    Raises:
        Exception: Anything the module raises, for example when it reads a value from a meta tensor.
    """
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if has_cuda else []
    # fused attention kernels are counted as zero on some devices (pytorch #195460, 2.13)
    with fork_rng(devices), FlopCounter() as counter, sdpa_kernel(SDPBackend.MATH):
        module.recipes_forward_on_meta(_on_meta(batch)).float().sum().backward()  # type: ignore[no-untyped-call]
    return float(counter.flops)


def has_sharded_parameters(module: nn.Module) -> bool:
    """Return whether any parameter is a DTensor, whose operators see global shapes on every rank."""
    return any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


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


def _on_meta(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach().to("meta")
    if isinstance(batch, dict):
        return {name: _on_meta(item) for name, item in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_on_meta(item) for item in batch)
    return batch
