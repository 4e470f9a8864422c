"""FLOPs and bytes of one operator, from the shapes of its arguments and results. Nothing is run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Kind = Literal["view", "memory", "matmul", "attention", "collective", "transfer"]

# operators that return a view or uninitialized memory: nothing is read or written
_FREE = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty"),
    *("new_empty_strided", "permute", "reshape", "resize_", "select", "set_", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_real", "_reshape_alias"),
    "_unsafe_view",
}
# operators that write their result and read nothing
_FILLS = {
    *("arange", "fill_", "full", "full_like", "new_zeros", "ones", "ones_like", "scalar_tensor", "zero_", "zeros"),
    "zeros_like",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one operator.

    Attributes:
        kind: Limiting resource.
        flops: Floating-point operations of matrix products; elementwise arithmetic is not counted.
        num_bytes: Bytes read and written. For a collective: bytes of its result. For a transfer to or from host memory:
                bytes moved.
        dtype: Dtype of the result.
        num_launches: Kernel launches.
        num_keys: Keys per sequence; attention only.
    """

    kind: Kind = "view"
    flops: float = 0.0
    num_bytes: float = 0.0
    dtype: torch.dtype = torch.float32
    num_launches: int = 0
    num_keys: int = 0


def cost_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Cost:
    """Return the cost of an operator that has already run, on real or fake tensors.

    Args:
        func: Operator, an overload of `torch.ops`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        out: Result of the call.
    """
    name = func._schema.name.partition("::")[2]
    if name in _FREE:
        return Cost()
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    dtype = outputs[0].dtype if outputs else inputs[0].dtype if inputs else torch.float32
    if func.namespace in ("c10d", "_c10d_functional"):
        return Cost("collective", num_bytes=max(map(bytes_of, [*inputs, *outputs]), default=0), dtype=dtype)
    if "attention" in name and "scaled_dot_product" in name:
        num_keys = inputs[2 if "backward" in name else 1].shape[2]
        flops = _attention_flops(name, inputs)
        return Cost("attention", flops, _traffic(inputs, outputs), inputs[0].dtype, 1, num_keys)
    if func._overloadpacket in flop_registry:
        flops = float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        return Cost("matmul", flops, _traffic(inputs, outputs), dtype, 1)
    count = _BYTES.get(name)
    if count is not None:
        traffic = count(inputs, outputs)
    elif name in _FILLS:
        traffic = sum(map(bytes_of, outputs))
    else:
        traffic = _traffic(inputs, outputs)
    return Cost("memory", 0.0, traffic, dtype, 1)


def bytes_of(tensor: Tensor) -> float:
    """Return the bytes of a tensor's elements."""
    return float(tensor.numel() * tensor.element_size())


def distinct_bytes(tensor: Tensor) -> float:
    """Return the bytes of a tensor, counting expanded axes once."""
    counted = math.prod(size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return float(counted * tensor.element_size())


def _traffic(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    return sum(map(distinct_bytes, inputs)) + sum(map(bytes_of, outputs))


def _attention_flops(name: str, inputs: Sequence[Tensor]) -> float:
    """Return the FLOPs of causal attention: half of all scores; five products in the backward pass, two forward."""
    is_backward = "backward" in name
    query, key = inputs[1:3] if is_backward else inputs[:2]
    batch, heads, num_tokens, size = query.shape
    per_product = 2.0 * batch * heads * num_tokens * key.shape[2] * size / 2
    return per_product * (5 if is_backward else 2)


# Operators that do not read or write each argument exactly once. The rows of a softmax over a vocabulary do not fit
# into the cache: maximum, sum and result each take a pass.
_BYTES: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor]], float]] = {
    "embedding": lambda inputs, outputs: 2 * bytes_of(outputs[0]) + bytes_of(inputs[1]),
    "embedding_dense_backward": lambda inputs, outputs: 2 * bytes_of(inputs[0]) + 2 * bytes_of(outputs[0]),
    "nll_loss_forward": lambda inputs, outputs: 3 * bytes_of(inputs[1]),
    "nll_loss_backward": lambda inputs, outputs: bytes_of(outputs[0]),
    "_log_softmax": lambda inputs, outputs: 3 * bytes_of(inputs[0]) + bytes_of(outputs[0]),
    "_softmax": lambda inputs, outputs: 3 * bytes_of(inputs[0]) + bytes_of(outputs[0]),
    "_log_softmax_backward_data": lambda inputs, outputs: (
        2 * (bytes_of(inputs[0]) + bytes_of(inputs[1])) + bytes_of(outputs[0])
    ),
    "native_layer_norm_backward": lambda inputs, outputs: (
        _traffic(inputs, outputs) + bytes_of(inputs[0]) + bytes_of(inputs[1])
    ),
}
