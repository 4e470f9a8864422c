"""Count the FLOPs of a micro-batch during its own training step, or on a meta-device copy of the model.

The training step never runs twice, so counting has no side effects on RNG states, logged values or replay buffers.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.random import fork_rng
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from ..protocols import SupportsMetaForward

Formula = Callable[..., float]  # called with the arguments of an operator, and its result as `out_val`
_aten = torch.ops.aten
# libraries of operators that are torch's own: those without a formula multiply no matrices
_OF_TORCH = {"aten", "prim", "prims", "profiler", "rngprims", "c10d", "_c10d_functional", "fsdp", "debugprims"}


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of matmuls, convolutions and attention while active; costs microseconds per operator.

    Attention is counted in full regardless of its mask; what is computed again is not counted, neither by activation
    checkpointing nor by the backward pass of fused attention.

    Attributes:
        flops: FLOPs counted so far.
        error: Reason why the count is invalid; None if it is valid.
        left_out: Operators of other libraries that have no formula. They count nothing.
    """

    supports_higher_order_operators = True  # flex attention, activation checkpoints

    def __init__(self) -> None:
        super().__init__()
        self.flops: float = 0.0
        self.error: str | None = None
        self.left_out: set[str] = set()
        _enter_higher_order_operators()

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        # otherwise torch.compile would run this batch uncompiled, with different rounding errors
        return True

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        # torch 2.6 to 2.8 lack the method above, and would run what they meet here uncompiled from then on
        return not _IGNORES_COMPILATION

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        operator = getattr(func, "_overloadpacket", func)
        formula = _find_formula(operator)
        if formula is None and torch.is_inference_mode_enabled() and isinstance(func, OpOverload):
            # composite operators, such as einsum: outside of this mode, autograd has taken them apart before
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is None:
            if isinstance(func, OpOverload) and func.namespace not in _OF_TORCH:
                self.left_out.add(str(operator))
        elif not (_is_recomputing() or _is_compiling()):
            try:
                self.flops += float(formula(*args, **kwargs, out_val=result))
            except Exception as error:  # a formula that cannot handle these arguments must not end the run
                self.error = f"{type(error).__name__} in the formula of {operator}"
        return result


def _find_formula(operator: Any) -> Formula | None:
    """Return the formula of an operator: ours, else that of torch's registry, to which other libraries add theirs."""
    own = _FORMULAS.get(operator)
    registered: Formula | None = flop_registry.get(operator)
    if own is not None or registered is None:
        return own
    if re.search("att.*backward", str(operator)):
        return _leave_out_scores(registered)
    return registered


def _product(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> float:
    """Return the FLOPs of [..., M, K] x [..., K, N]; of a sparse factor, the stored values alone are multiplied."""
    if a.layout is torch.strided and b.layout is torch.strided:
        return 2.0 * a.numel() * b.shape[-1]
    if a.layout is not torch.strided and b.layout is not torch.strided:
        raise NotImplementedError("a product of two sparse matrices depends on where their values are")
    if a.layout is torch.strided:
        return 2.0 * _count_values(b) * a.shape[-2]
    return 2.0 * _count_values(a) * b.shape[-1]


def _added_product(c: Tensor, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> float:
    return _product(a, b)


def _vector_product(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> float:
    """Return the FLOPs of [M, K] x [K] and of [K] x [K]."""
    return 2.0 * _count_values(a)


def _grouped_product(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> float:
    """Return the FLOPs of a product per group, where a 2D factor holds the rows or columns of all G groups."""
    # [G, M, K] x [K, N]: each group has a share of the N columns
    return _product(a, b) / (a.shape[0] if (a.dim(), b.dim()) == (3, 2) else 1)


def _sampled_product(c: Tensor, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> float:
    return 2.0 * _count_values(c) * a.shape[-1]


def _count_values(matrix: Tensor) -> int:
    if matrix.layout is torch.strided:
        return matrix.numel()
    stored: Tensor = matrix._values() if matrix.layout is torch.sparse_coo else matrix.values()
    return stored.numel()


def _linear(inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> float:
    return 2.0 * _count_values(inputs) * weight.shape[0]


def _linear_backward(inputs: Tensor, grad: Tensor, weight: Tensor, mask: Sequence[bool], **kwargs: Any) -> float:
    return _linear(inputs, weight) * sum(mask[:2])


def _convolution_backward(grad: Tensor, inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> float:
    """Return the FLOPs of the gradients of inputs and weight, each as many as those of the forward pass."""
    # [C_out, C_in / groups, ...], or [C_in, C_out / groups, ...] if transposed; torch's formula leaves groups out
    *_, transposed, _, _, mask = args
    positions = (inputs if transposed else grad).shape  # [B, C, ...]
    return float(2 * weight.numel() * positions[0] * prod(positions[2:]) * sum(mask[:2]))


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor,
    expand_a: Sequence[int], expand_b: Sequence[int], expand_c: Sequence[int], summed: Sequence[int],
    *args: Any, **kwargs: Any,
) -> float:  # fmt: skip
    """Return the FLOPs of the product of a and b, summed over what c does not have, and of its product with c."""
    of_a, of_b, of_c = (
        _sizes(each, expanded) for each, expanded in ((a, expand_a), (b, expand_b), (c, expand_c))
    )  # fmt: skip
    both = of_a | of_b
    kept = {dim: size for dim, size in both.items() if dim not in summed or dim in of_c}
    return 2.0 * (prod(both.values()) + prod((kept | of_c).values()))


def _sizes(factor: Tensor, expanded: Sequence[int]) -> dict[int, int]:
    """Return the size of each dimension that a factor of `_trilinear` has."""
    dims = (dim for dim in range(factor.dim() + len(expanded)) if dim not in expanded)
    return dict(zip(dims, factor.shape, strict=True))


def _rnn(inputs: Tensor, weights: Sequence[Tensor], *args: Any, **kwargs: Any) -> float:
    """Return the FLOPs of all layers and directions: each matrix is multiplied once per position of a sequence."""
    return 2.0 * _count_positions(inputs) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _rnn_backward(*args: Any, bidirectional_at: int, **kwargs: Any) -> float:
    inputs, weights, stride, mask = *args[:3], args[-1]
    first = weights[0].numel() + (weights[stride].numel() if args[bidirectional_at] else 0)
    whole = _rnn(inputs, weights)
    # the gradients of hidden states and inputs, and those of the weights
    return float(whole * (1 + bool(mask[3])) - (0 if mask[0] else 2 * _count_positions(inputs) * first))


def _cudnn_rnn_backward(*args: Any, **kwargs: Any) -> float:
    return _rnn_backward(*args, bidirectional_at=17)


def _miopen_rnn_backward(*args: Any, **kwargs: Any) -> float:
    return _rnn_backward(*args, bidirectional_at=16)


def _onednn_rnn(inputs: Tensor, of_inputs: Tensor, of_hidden: Tensor, *args: Any, **kwargs: Any) -> float:
    """Return the FLOPs of one layer and direction."""
    return _rnn(inputs, (of_inputs, of_hidden))


def _onednn_rnn_backward(inputs: Tensor, of_inputs: Tensor, of_hidden: Tensor, *args: Any, **kwargs: Any) -> float:
    factors = 2.0 * _count_positions(inputs)  # inputs of a first layer need no gradient, frozen weights neither
    for_weights = sum(weight.numel() for weight in (of_inputs, of_hidden) if weight.requires_grad)
    for_states = of_hidden.numel() + (of_inputs.numel() if inputs.requires_grad else 0)
    return factors * (for_weights + for_states)


def _count_positions(inputs: Tensor) -> int:
    """Return B * T of [T, B, I], [B, T, I] or the packed [positions, I]."""
    return inputs.numel() // max(1, inputs.shape[-1])


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> float:
    # [B, H, T, Q], [B, G, S, Q], [B, G, S, V]: queries may have more heads than keys
    return 2.0 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> float:
    return 2.0 * _attention(query, key, value)


def _flex_attention_backward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> float:
    return 2.0 * _attention(query, key, value)


def _leave_out_scores(formula: Formula) -> Formula:
    """Correct a formula that counts five products in the backward pass, the first of which computes the scores again.

    Args:
        formula: Formula of torch's registry, called with gradient, queries, keys and values.
    """

    def corrected(*args: Any, **kwargs: Any) -> float:
        # queries and keys are Q wide, values V: scores and the gradients of queries and keys, of scores and values
        of_query, of_value = args[1].shape[-1], args[3].shape[-1]
        return float(formula(*args, **kwargs) * (2 * of_query + 2 * of_value) / (3 * of_query + 2 * of_value))

    return corrected


def _attention_module(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, of_inputs: Tensor, b: Any, of_outputs: Tensor,
    *args: Any, **kwargs: Any,
) -> float:  # fmt: skip
    """Return the FLOPs of `nn.MultiheadAttention` in eval mode without gradients."""
    inputs = sum(_count_positions(each) for each in (query, key, value)) * width * width
    outputs = _count_positions(query) * of_outputs.numel()
    return 2.0 * (inputs + outputs) + 4.0 * _count_positions(query) * key.shape[1] * width


def _encoder_layer(source: Tensor, width: int, *args: Any, **kwargs: Any) -> float:
    """Return the FLOPs of `nn.TransformerEncoderLayer` in eval mode without gradients."""
    # the first 16, which a mask follows
    matrices = sum(each.numel() for each in args[:16] if isinstance(each, Tensor) and each.dim() == 2)
    return 2.0 * _count_positions(source) * (matrices + 2 * source.shape[1] * width)


# Formulas that torch's registry lacks, which counts those operators as zero, or has wrong (checked with torch 2.13):
# of grouped convolutions (pytorch #195460 names those of attention on a CPU), of sparse factors, which it takes for
# dense ones, and of attention, see `_leave_out_scores`.
_NAMED: dict[str, Formula] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_sparse_mm", "_sparse_mm_reduce_impl"), _product),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "_sparse_addmm"), _added_product),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped_product),
    **dict.fromkeys(("mv", "dot", "vdot"), _vector_product),
    "addmv": lambda c, a, b, *args, **kwargs: _vector_product(a, b),
    "sparse_sampled_addmm": _sampled_product,
    "linear": _linear,
    "linear_backward": _linear_backward,
    "convolution_backward": _convolution_backward,
    "_trilinear": _trilinear,
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), _rnn),
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
    "miopen_rnn_backward": _miopen_rnn_backward,
    "mkldnn_rnn_layer": _onednn_rnn,
    "mkldnn_rnn_layer_backward": _onednn_rnn_backward,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math_for_mps",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
        _attention_backward,
    ),
    "_native_multi_head_attention": _attention_module,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
# a version of torch may lack some of them
_FORMULAS: dict[Any, Formula] = {
    flex_attention: _attention,
    flex_attention_backward: _flex_attention_backward,
    **{getattr(_aten, name): formula for name, formula in _NAMED.items() if hasattr(_aten, name)},
}

_IGNORES_COMPILATION = hasattr(TorchDispatchMode, "ignore_compile_internals")


def _enter_higher_order_operators() -> None:
    """Give every higher-order operator a rule for the counter: without one, torch 2.6 ends the run."""
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    for operator in torch._ops._higher_order_ops.values():
        if FlopCounter not in operator.python_key_table:
            operator.py_impl(FlopCounter)(partial(_count_higher_order, operator))


def _count_higher_order(operator: Any, counter: FlopCounter, *args: Any, **kwargs: Any) -> Any:
    return counter.__torch_dispatch__(operator, (), args, kwargs)


def _is_compiling() -> bool:
    """Return whether torch.compile traces what it compiles, which only torch before 2.9 shows to a counter."""
    return not _IGNORES_COMPILATION and TracingContext.try_get() is not None


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
    has_cuda = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if has_cuda else []
    # fused attention kernels are counted as zero on some devices (pytorch #195460, 2.13)
    with fork_rng(devices), FlopCounter() as counter, sdpa_kernel(SDPBackend.MATH):
        module.recipes_forward_on_meta(_on_meta(batch)).float().sum().backward()
    return float(counter.flops)


def has_sharded_parameters(module: nn.Module) -> bool:
    """Return whether any parameter is a DTensor, whose operators see global shapes on every rank."""
    return any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


def get_shapes(batch: Any) -> Any:
    """Return the shapes of a batch's tensors and arrays, which determine its FLOPs; () for everything else.

    Looks into mappings, sequences and the attributes of objects, such as torch_geometric's graphs. A text is `TEXT`.
    """
    seen: set[int] = set()
    shapes = _get_shapes(batch, seen)
    return () if len(seen) > _MAX_OBJECTS else shapes


TEXT = "text"
_MAX_OBJECTS = 2_000  # a batch that refers to its whole dataset must not be searched at each step


def _get_shapes(item: Any, seen: set[int]) -> Any:
    if isinstance(item, Tensor) or (hasattr(type(item), "shape") and not isinstance(item, Mapping)):
        return tuple(item.shape)  # a TensorDict has a shape, too, which is not that of its tensors
    if isinstance(item, (str, bytes)):
        return TEXT
    if isinstance(item, (int, float, type, nn.Module)) or id(item) in seen or len(seen) > _MAX_OBJECTS:
        return ()
    seen.add(id(item))
    return tuple(_get_shapes(member, seen) for member in _get_members(item))


def _get_members(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return [*item.values()]
    if isinstance(item, (list, tuple)):
        return [*item]
    if hasattr(type(item), "__get__"):  # a function
        return []
    slots = [vars(cls)["__slots__"] for cls in type(item).__mro__ if "__slots__" in vars(cls)]
    names = [name for own in slots for name in ([own] if isinstance(own, str) else own) if not name.startswith("__")]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in names)]


def are_telling(shapes: Any) -> bool:
    """Return whether shapes determine the FLOPs: not without a tensor, nor if the module may read a text.

    Args:
        shapes: Return value of `get_shapes`.
    """
    return TEXT not in (leaves := [*_leaves(shapes)]) and any(leaves)


def _leaves(shapes: Any) -> Iterator[Any]:
    """Yield each shape and each `TEXT`."""
    if shapes == TEXT or (shapes and isinstance(shapes[0], int)):
        yield shapes
    else:
        for member in shapes:
            yield from _leaves(member)


def find_batch_size(shapes: Any) -> int | None:
    """Return the first dimension that all tensors of a batch share; None if they differ in it or there are none.

    Args:
        shapes: Return value of `get_shapes`.
    """
    sizes = {shape[0] for shape in _leaves(shapes) if shape != TEXT}
    return sizes.pop() if len(sizes) == 1 else None


def _on_meta(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach().to("meta")
    if isinstance(batch, dict):
        return {name: _on_meta(item) for name, item in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_on_meta(item) for item in batch)
    return batch
