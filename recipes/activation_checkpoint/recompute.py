"""Recompute blocks in the backward pass, entirely or except for matmuls and attention."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from recipes.activation_checkpoint.host_offload import HostOffload, Kept, Saved, unpack
from recipes.numerics.grouped_linear import PRODUCT as GROUPED_PRODUCT
from recipes.numerics.linear import PRODUCTS as CPU_PRODUCTS
from recipes.torch_internals import COLLECTIVES, CustomGraphPass, tree_leaves

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
MakeContexts = Callable[[], Contexts]
Policy = Callable[..., CheckpointPolicy]

_aten = torch.ops.aten
# the operations that dominate a block's time; `linear` and attention appear here under these names
_PRODUCTS = frozenset(
    {
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.linear.default),
        *(*CPU_PRODUCTS, GROUPED_PRODUCT),
        *(_aten._scaled_mm.default, _aten._grouped_mm.default, _aten.convolution.default),
    }
)
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.higher_order.flex_attention,
    }
)
_COLLECTIVES = frozenset(
    {
        COLLECTIVES.all_gather_into_tensor.default,
        COLLECTIVES.all_reduce.default,
        COLLECTIVES.all_to_all_single.default,
        COLLECTIVES.reduce_scatter_tensor.default,
    }
)


def recompute_block(block: nn.Module, *, keep_every_nth_product: int | None, offload: HostOffload | None) -> None:
    """Wrap the forward of a block so that the backward pass recomputes it with the same random numbers.

    Args:
        block: Block to modify in place.
        keep_every_nth_product: Save the outputs of attention, collectives and every n-th matrix product; None saves
            only the inputs.
        offload: Offloads the saved outputs; None leaves them on the device. Inputs are offloaded by their own hooks.
    """
    eager: MakeContexts = noop_context_fn
    if keep_every_nth_product is not None:
        eager = functools.partial(_make_contexts, every_nth=keep_every_nth_product)
        if offload is not None:
            eager = functools.partial(_offloading_contexts, eager, offload)
    if statistics := _find_statistics(block):
        eager = functools.partial(_restoring_contexts, eager, statistics)
    block.forward = _recomputed(block, block.forward, eager, keep_every_nth_product)


def _recomputed(
    block: nn.Module, forward: Callable[..., Any], eager: MakeContexts, every_nth: int | None
) -> Callable[..., Any]:
    """Return a forward that checkpoints the block if there will be a backward pass.

    A compiled block needs only the policy: its saved outputs reach the saved-tensor hooks like any others, and its
    recomputation changes no buffers.
    """

    def recomputed_forward(*inputs: Any, **options: Any) -> Any:
        if not (block.training and torch.is_grad_enabled() and _has_backward(block, [*inputs, *options.values()])):
            return forward(*inputs, **options)
        if not torch.compiler.is_compiling():
            return checkpoint(forward, *inputs, use_reentrant=False, context_fn=eager, **options)
        if every_nth is None:
            return checkpoint(forward, *inputs, use_reentrant=False, **options)
        make = functools.partial(_make_contexts, every_nth=every_nth)  # here: Dynamo rejects closure variables
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=make, **options)

    return recomputed_forward


def _has_backward(block: nn.Module, inputs: Iterable[Any]) -> bool:
    """Return whether a gradient reaches a block: one that is frozen on frozen inputs has nothing to recompute.

    Compiled, it has no graph of a backward pass, and torch 2.13 fails to recompute attention there.
    """
    is_differentiable = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in inputs)
    return is_differentiable or any(parameter.requires_grad for parameter in block.parameters())


def _make_contexts(*, every_nth: int) -> Contexts:
    """Return the contexts for one forward pass and for its recomputation."""
    contexts: Contexts = create_selective_checkpoint_contexts(keep_products(every_nth))
    return contexts


def keep_products(every_nth: int) -> Policy:
    """Return the policy for one call of a block; the policy counts matrix products.

    Args:
        every_nth: 1 keeps all matrix products, 2 the first, the third, and so on.
    """
    num_products = 0

    def policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal num_products
        keeps = op in _COLLECTIVES
        if op in _PRODUCTS:
            keeps = num_products % every_nth == 0
            num_products += 1
        elif op in _ATTENTION:
            keeps = not _drops_weights(op, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _drops_weights(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether attention applies dropout.

    If its output were saved, the recomputation would skip its random draws, and all later dropout would use different
    random numbers: silently wrong gradients.
    """
    if "dropout_p" in kwargs:
        return bool(kwargs["dropout_p"])
    names = [argument.name for argument in op._schema.arguments] if hasattr(op, "_schema") else []
    index = names.index("dropout_p") if "dropout_p" in names else len(args)
    return index < len(args) and bool(args[index])


def _offloading_contexts(make: MakeContexts, offload: HostOffload) -> Contexts:
    """Return contexts that offload the saved outputs between the forward pass and the recomputation."""
    computing, recomputing = make()
    assert offload.active is not None, "a block was called past its class"
    return _packing(computing, offload.active.pack), _unpacking(recomputing)


@contextlib.contextmanager
def _packing(computing: Any, pack: Callable[[Tensor], Saved | Kept]) -> Iterator[None]:
    """Compute, then offload the saved outputs; the block's inputs are offloaded by its hooks."""
    with computing:
        yield
    for cell in _kept_cells(computing):
        cell.val = pack(cell.val)


@contextlib.contextmanager
def _unpacking(recomputing: Any) -> Iterator[None]:
    """Put the saved outputs back where torch looks for them, then recompute."""
    for cell in _kept_cells(recomputing):
        if not isinstance(cell.val, Tensor):
            cell.val = unpack(cell.val)
            cell.version = cell.val._version  # a new tensor with its own version counter
    with recomputing:
        yield


def _kept_cells(mode: Any) -> list[Any]:
    """Return the saved tensors of a selective checkpoint, each in a private `_VersionWrapper` (torch 2.13)."""
    cells = tree_leaves([list(results.values()) for results in mode.storage.values()])
    return [cell for cell in cells if isinstance(getattr(cell, "val", None), Tensor | Saved | Kept)]


def _find_statistics(block: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return buffers that a forward pass may change, such as running means; non-persistent ones are constant."""
    return [
        (module, name)
        for module in block.modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


def _restoring_contexts(make: MakeContexts, statistics: list[tuple[nn.Module, str]]) -> Contexts:
    computing, recomputing = make()
    return computing, _restoring(recomputing, statistics)


@contextlib.contextmanager
def _restoring(recomputing: Any, statistics: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """Recompute, then restore the running statistics, which the forward pass has already updated."""
    buffers = [getattr(module, name) for module, name in statistics]
    before = [buffer.clone() for buffer in buffers]
    try:
        with recomputing:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


# Keep the results of random operations in a compiled block: torch's partitioner may recompute them with other numbers.
#
# With `activation_memory_budget` below 1, torch 2.13 recomputes dropout from a new seed, and gradients are those of
# another mask than the loss (pytorch#190758, #190717).


class KeepRandomNumbers(CustomGraphPass):
    """Mark every operation that draws random numbers to be saved, before forward and backward pass are separated.

    Inductor has by then replaced most of them by a seed, 8 bytes, from which the same numbers are computed again; what
    it does not replace, such as attention with dropout, is saved itself.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            # inside activation checkpointing of the block's own, torch replays the numbers
            if "recompute" not in node.meta and _is_random(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> str:
        """Return the key of this pass in torch's caches of compiled code; change it with the code."""
        return "lightning_recipes.keep_random_numbers.1"


def _is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, itself or in a graph that it calls."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    return any(_is_random(inner) for graph in _called_graphs(node) for inner in graph.nodes)


def _called_graphs(node: fx.Node) -> Iterable[fx.Graph]:
    """Return the graphs that a higher-order operator calls."""
    owner: Any = node.graph.owning_module
    for argument in node.all_input_nodes if owner is not None else ():
        if argument.op == "get_attr":
            called = getattr(owner, str(argument.target), None)
            if isinstance(called, fx.GraphModule):
                yield called.graph
