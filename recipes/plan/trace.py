"""Record the operators of a step and the live bytes after each; tensors may be fake."""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from recipes.parallel.placement import local
from recipes.torch_internals import COLLECTIVES, TorchDispatchMode, tree_leaves

# FLOPs and bytes of one operator, from the shapes of its arguments and results. Nothing is run.

Kind = Literal["view", "memory", "matmul", "convolution", "attention", "collective", "transfer"]

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


# fused into no kernel with their neighbors
_FUSES_NOT = ("embedding", "_fused_", "_foreach_", "index", "nll_loss", "storage")


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one operator.

    Attributes:
        kind: Limiting resource.
        flops: Floating-point operations of matrix products and convolutions; elementwise arithmetic is not counted.
        num_bytes: Bytes read and written. For a collective: bytes of its result. For a transfer to or from host memory:
                bytes moved.
        dtype: Dtype of the result.
        num_launches: Kernel launches.
        num_keys: Keys per sequence, of which a query sees half on average: twice those of attention without a mask.
        padded_flops: FLOPs with the channels of a group padded to the tiles of tensor cores; convolutions only.
        reread_bytes: Bytes of `num_bytes` that are read again once a sum over all of them is known, fused or not.
    """

    kind: Kind = "view"
    flops: float = 0.0
    num_bytes: float = 0.0
    dtype: torch.dtype = torch.float32
    num_launches: int = 0
    num_keys: int = 0
    padded_flops: float = 0.0
    reread_bytes: float = 0.0


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
        is_masked = _is_masked(_name_arguments(func, args, kwargs))
        num_keys = inputs[2 if "backward" in name else 1].shape[2] * (1 if is_masked else 2)
        flops = _attention_flops(name, inputs, is_masked=is_masked)
        return Cost("attention", flops, _traffic(inputs, outputs), inputs[0].dtype, 1, num_keys)
    if name in ("convolution", "convolution_backward"):
        return _cost_of_convolution(name, _name_arguments(func, args, kwargs), inputs, outputs)
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
    again = 0.0
    if "batch_norm" in name or "group_norm" in name:
        again = _reread_bytes(name, _name_arguments(func, args, kwargs))
    return Cost("memory", 0.0, traffic + again, dtype, 1, reread_bytes=again)


def is_fusible(name: str, cost: Cost) -> bool:
    """Return whether torch.compile fuses an operator with its neighbors, given its name with the namespace."""
    return cost.kind == "memory" and not any(word in name.partition("::")[2] for word in _FUSES_NOT)


def is_in_compiled_place(section: str) -> bool:
    """Return whether a section is that of a block or of the loss, which a compiled run compiles."""
    return section.partition("/")[2] not in ("", "embedding")


def bytes_of(tensor: Tensor) -> float:
    """Return the bytes of a tensor's elements."""
    return float(tensor.numel() * tensor.element_size())


def distinct_bytes(tensor: Tensor) -> float:
    """Return the bytes of a tensor, counting expanded axes once."""
    counted = math.prod(size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return float(counted * tensor.element_size())


def _traffic(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    return sum(map(distinct_bytes, inputs)) + sum(map(bytes_of, outputs))


def _name_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the operator's schema, without those left at their defaults."""
    return dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)


def _is_masked(named: Mapping[str, Any]) -> bool:
    """Return whether attention has a causal mask, or one of documents, which is causal within each.

    A mask that differs between heads is none: it adds relative positions to all scores, as some image models do.
    """
    mask = named.get("attn_mask", named.get("attn_bias"))
    is_for_all_heads = mask is not None and (mask.dim() < 4 or mask.shape[1] == 1 or mask.stride(1) == 0)
    return bool(named.get("is_causal", False)) or is_for_all_heads


def _attention_flops(name: str, inputs: Sequence[Tensor], *, is_masked: bool) -> float:
    """Return the FLOPs of attention, masked: half of all scores; five products in the backward pass, two forward."""
    is_backward = "backward" in name
    query, key = inputs[1:3] if is_backward else inputs[:2]
    batch, heads, num_tokens, size = query.shape
    per_product = 2.0 * batch * heads * num_tokens * key.shape[2] * size * (0.5 if is_masked else 1.0)
    return per_product * (5 if is_backward else 2)


# A convolution is a matrix product of windows. Tensor cores load eight channels at a time, and the smallest tile of the
# result that libraries have kernels for is 64 wide (NVIDIA's guide to matrix multiplication lists them).
_LOADED_CHANNELS, _TILE = 8, 64


def _cost_of_convolution(
    name: str, named: Mapping[str, Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Cost:
    """Return the cost of a convolution, or of its one or two gradients, each of which takes as many FLOPs.

    The gradients of inputs and of weights are two kernels, and both read that of the results.
    """
    x, weight, groups = named["input"], named["weight"], named["groups"]
    grad = named.get("grad_output")
    result = outputs[0] if grad is None else grad
    rows, columns = weight.shape[0] // groups, weight.shape[1]
    num_in, num_out = (rows, columns) if named["transposed"] else (columns, rows)
    window = math.prod(weight.shape[2:])
    positions = x if named["transposed"] else result  # [B, C, ...]
    flops = 2.0 * weight.numel() * positions.shape[0] * math.prod(positions.shape[2:])
    forward = _pad(num_in, _LOADED_CHANNELS) / num_in * _pad(num_out, _TILE) / num_out
    if grad is None:
        return Cost("convolution", flops, _traffic(inputs, outputs), result.dtype, 1, padded_flops=flops * forward)
    of_inputs = _pad(num_out, _LOADED_CHANNELS) / num_out * _pad(num_in, _TILE) / num_in
    of_weight = _pad(num_out, _TILE) / num_out
    of_weight *= _pad(window * _pad(num_in, _LOADED_CHANNELS), _TILE) / (window * num_in)
    shares = [
        share for share, is_wanted in zip((of_inputs, of_weight), named["output_mask"], strict=False) if is_wanted
    ]
    again = (len(shares) - 1) * bytes_of(grad)
    return Cost(
        "convolution",
        len(shares) * flops,
        _traffic(inputs, outputs) + again,
        grad.dtype,
        len(shares),
        padded_flops=sum(shares) * flops,
    )


def _pad(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _reread_bytes(name: str, named: Mapping[str, Any]) -> float:
    """Return what a norm over a batch reads twice: mean and variance, or their gradients, come from a pass before."""
    is_backward = "backward" in name
    if not named.get("train" if is_backward else "training", True):  # with statistics of a running average
        return 0.0
    again = bytes_of(named["input"])
    return again + bytes_of(named["grad_out"]) if is_backward else again


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


WEIGHTS, FROZEN, GRADIENTS, OPTIMIZER, CASTS, ACTIVATIONS, OFFLOADED, LOSS, GATHERED, TEMPORARY = CATEGORIES = (
    "weights",
    "frozen models",
    "gradients",
    "optimizer",
    "autocast copies",
    "activations",
    "offloaded activations",
    "logits and loss",
    "communication",
    "temporary",
)
KEPT = (ACTIVATIONS, CASTS)  # from the forward to the backward pass
_WAIT: Any = COLLECTIVES.wait_tensor.default
_STORAGE: Any = torch.UntypedStorage  # whose method the tracer replaces
BEFORE = "before"  # section of everything that exists when the step begins
# namespaces of operators that move no data
_BOOKKEEPING = frozenset({"prim", "profiler"})
# their results are gathered weights and gradients in flight; differentiable collectives return activations
_COLLECTIVES = frozenset({"c10d", "fsdp"})


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operator.

    Attributes:
        name: Name in torch, with the namespace.
        section: Part of the step that it runs in.
        cost: FLOPs and bytes.
        allocated: Bytes allocated by it, by category.
        freed: Bytes freed after it and before the next operator, by category.
        reads: Bytes read, by storage number.
        writes: Bytes written, by storage number.
        temporary: Storages of `writes` that are freed before the section ends.
        dimension: Mesh dimension of a collective; empty for other operators and for collectives over all ranks.
        call: Operator and arguments, to run it again; None unless calls are kept.
    """

    name: str
    section: str
    cost: Cost
    allocated: dict[str, int]
    freed: dict[str, int]
    reads: dict[int, float] = field(default_factory=dict)
    writes: dict[int, float] = field(default_factory=dict)
    temporary: frozenset[int] = frozenset()
    dimension: str = ""
    call: Any = None


@dataclass(eq=False)
class _Block:
    """Storage with its size and category."""

    num_bytes: int
    section: str
    by_collective: bool
    category: str | None = None
    outlives_forward: bool = False
    freed_in: str | None = None


@dataclass
class _Record:
    name: str
    section: str
    cost: Cost
    call: Any
    dimension: str = ""
    changes: list[tuple[_Block, int]] = field(default_factory=list)
    reads: dict[_Block, float] = field(default_factory=dict)
    writes: dict[_Block, float] = field(default_factory=dict)


class StepTracer(TorchDispatchMode):
    """Records every operator that runs while it is active.

    A storage counts from the operator that creates it until its last reference is gone, as with torch's allocators.
    Temporary allocations inside an operator are not seen.

    Args:
        keep_calls: Keep the arguments of each operator.
        dimensions: Mesh dimension by process group name.

    Attributes:
        section: Part of the step that is running; set by the caller.
    """

    def __init__(self, *, keep_calls: bool = False, dimensions: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._dimensions = dimensions or {}
        self.section = BEFORE
        self._keep_calls = keep_calls
        self._records: list[_Record] = [_Record("start", BEFORE, Cost(), None)]
        self._refs: dict[int, tuple[Any, _Block]] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) or kind.__name__ == "NF4Tensor" for kind in types):
            return NotImplemented  # operators on their plain tensors are dispatched here again
        kwargs = kwargs or {}
        if func is _WAIT:  # returns its input; a fake result would be a different tensor
            return args[0]
        out = func(*args, **kwargs)
        namespace = func.namespace
        if namespace in _BOOKKEEPING:
            return out
        call = (func, args, kwargs) if self._keep_calls else None
        record = _Record(str(func._schema.name), self.section, cost_of(func, args, kwargs, out), call)
        self._records.append(record)
        if record.cost.kind == "collective":
            record.dimension = self._dimensions.get(_group_name(args), "")
            if record.dimension == "shard" and "all_to_all" in record.name:
                record.dimension = "expert"  # the same ranks, and therefore the same group
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                block = self.add(tensor, by_collective=namespace in _COLLECTIVES)
                record.writes[block] = bytes_of(tensor)
        if record.name == "aten::_to_copy" and self._is_weight(args[0]):
            for block in record.writes:
                block.category = CASTS
        if record.name == "aten::copy_":
            self._note_transfer(record, args)
        if record.cost.kind == "memory":
            for tensor in tree_leaves((args, kwargs)):
                known = self._refs.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None
                if known is not None:
                    record.reads[known[1]] = distinct_bytes(tensor)
        return out

    def add(self, tensor: Tensor, *, category: str | None = None, by_collective: bool = False) -> _Block:
        """Track the storage of a tensor from now on, optionally with a category.

        Args:
            tensor: Any tensor; for a `DTensor` the local part is tracked.
            category: Its category; None: decided at the end of the step.
            by_collective: Whether a collective created it.
        """
        storage = local(tensor).untyped_storage()
        key = storage._cdata
        known = self._refs.get(key)
        if known is None:
            block = _Block(storage.nbytes(), self.section, by_collective)
            self._refs[key] = (weakref.ref(storage, lambda _: self._free(key)), block)
            self._change(block, block.num_bytes)
        else:
            block = known[1]
        if category is not None:
            block.category = category
        return block

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor is tracked."""
        return local(tensor).untyped_storage()._cdata in self._refs

    def _note_transfer(self, record: _Record, args: Any) -> None:
        """Record a copy to or from host memory as a transfer; its source and the copy that returns are activations."""
        known = [self._refs.get(tensor.untyped_storage()._cdata) for tensor in args[:2]]
        blocks = [entry[1] for entry in known if entry is not None]
        if OFFLOADED in [block.category for block in blocks]:
            record.cost = replace(record.cost, kind="transfer", num_bytes=bytes_of(args[0]))
            for block in blocks:
                block.category = block.category or ACTIVATIONS

    def _is_weight(self, tensor: Tensor) -> bool:
        known = self._refs.get(tensor.untyped_storage()._cdata)
        return known is not None and (known[1].category in (WEIGHTS, FROZEN) or known[1].by_collective)

    def _free(self, key: int) -> None:
        _, block = self._refs.pop(key)
        block.freed_in = self.section
        self._change(block, -block.num_bytes)

    def _change(self, block: _Block, num_bytes: int) -> None:
        if num_bytes:
            self._records[-1].changes.append((block, num_bytes))

    def _resize(self, storage: torch.UntypedStorage) -> None:
        known = self._refs.get(storage._cdata)
        if known is not None:
            block, size = known[1], storage.nbytes()
            block.by_collective = True  # only FSDP2 resizes storages, those of gathered weights
            if size > block.num_bytes:  # an allocation between two operators
                self._records.append(_Record("storage::resize", self.section, Cost(), None))
            self._change(block, size - block.num_bytes)
            block.num_bytes = size

    @override
    def __enter__(self) -> "StepTracer":
        self._resize_storage, tracer = _STORAGE.resize_, self

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            tracer._resize_storage(storage, size)
            tracer._resize(storage)

        _STORAGE.resize_ = resize_
        super().__enter__()
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _STORAGE.resize_ = self._resize_storage

    def end_forward(self) -> None:
        """Mark live storages created in the forward pass as kept for the backward pass."""
        for _, block in self._refs.values():
            block.outlives_forward = True

    def ops(self, *, is_compiled: bool = False) -> list[Op]:
        """Return the recorded operators with a category for every storage; views are merged into the previous one.

        Args:
            is_compiled: Whether blocks and loss are compiled: what adjacent elementwise operators pass to each other
                then takes no memory.
        """
        ops: list[Op] = []
        if is_compiled:
            _fuse(self._records)
        numbers: dict[_Block, int] = {}

        def number(block: _Block) -> int:
            return numbers.setdefault(block, len(numbers))

        for record in self._records:
            allocated = _sum_by_category((block, size) for block, size in record.changes if size > 0)
            freed = _sum_by_category((block, -size) for block, size in record.changes if size < 0)
            if record.cost.kind == "view" and not allocated and ops and ops[-1].section == record.section:
                for category, num_bytes in freed.items():
                    ops[-1].freed[category] = ops[-1].freed.get(category, 0) + num_bytes
                continue
            if record.section == BEFORE and ops:
                for category, num_bytes in allocated.items():
                    ops[0].allocated[category] = ops[0].allocated.get(category, 0) + num_bytes
                continue
            ops.append(
                Op(
                    name=record.name,
                    section=record.section,
                    cost=record.cost,
                    call=record.call,
                    allocated=allocated,
                    freed=freed,
                    reads={number(block): size for block, size in record.reads.items()},
                    writes={number(block): size for block, size in record.writes.items()},
                    temporary=frozenset(number(b) for b in record.writes if b.freed_in == record.section),
                    dimension=record.dimension,
                )
            )
        return ops


def _group_name(args: Sequence[Any]) -> str:
    """Return the process group name that a collective was called with."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).group_name
    names = [arg for arg in args if isinstance(arg, str)]  # the name of the reduction precedes that of the group
    return names[-1] if names else ""


def _fuse(records: Iterable[_Record]) -> None:
    """Move the memory of each run of adjacent elementwise operators to its ends, in place, without what it frees."""
    run: list[_Record] = []
    for record in records:
        fuses = is_in_compiled_place(record.section) and is_fusible(record.name, record.cost)
        is_view = record.cost.kind == "view" and not any(size > 0 for _, size in record.changes)
        if not (run and run[0].section == record.section and (fuses or is_view)):
            _merge_changes(run)
            run = []
        if run or fuses:
            run.append(record)
    _merge_changes(run)


def _merge_changes(run: Sequence[_Record]) -> None:
    changes = [change for record in run for change in record.changes]
    inside = {block for block, size in changes if size > 0} & {block for block, size in changes if size < 0}
    for record in run:
        record.changes = []
    for block, size in changes:
        if block not in inside:
            run[0 if size > 0 else -1].changes.append((block, size))


def _sum_by_category(changes: Iterable[tuple[_Block, int]]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for block, num_bytes in changes:
        sums[_categorize(block)] += num_bytes
    return {category: total for category, total in sums.items() if total}


def _categorize(block: _Block) -> str:
    if block.category is not None:
        return block.category
    if block.by_collective:
        return GATHERED
    if block.section.endswith("head"):
        return LOSS
    return ACTIVATIONS if block.outlives_forward and block.section.startswith("forward") else TEMPORARY
