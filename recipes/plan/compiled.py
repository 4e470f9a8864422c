"""Count what a compiled block keeps for its backward pass, by running torch's own partitioner on fake tensors.

`torch.compile` keeps less than eager mode: its partitioner recomputes elementwise operations, such as the float32
copies of a norm, in the kernels of the backward pass. A recorded step has the operators of eager mode, whose temporary
tensors are an upper bound; only what its blocks keep is replaced.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from recipes.parallel.placement import local
from recipes.plan.activations import drop_kept
from recipes.plan.trace import ACTIVATIONS, CASTS, Op, StepTracer
from recipes.runtime.console import LOGGER
from recipes.torch_internals import FakeTensorMode, dynamo_config, set_aside_modes, tree_leaves

_BACKEND = "aot_eager_decomp_partition"  # inductor's decompositions and partitioner, without its kernels
_MOST_SHAPES = 256  # of one class of block in a process; by default torch runs the ninth one in eager mode
# Part of a block's activations that the compiler recomputes, by all that decides it. It does not depend on the size of
# the batch, so that a search over micro-batches compiles once
_shares: dict[tuple[object, ...], float | None] = {}


class CompiledBlocks:
    """Counts what the blocks of a model keep, while their step is recorded.

    Args:
        blocks: Blocks that run compiled, by section of the tracer; their `forward` is wrapped in place.
        tracer: Tracer of the step.
        fake: Mode of its tensors.
    """

    def __init__(self, blocks: dict[str, nn.Module], tracer: StepTracer, fake: FakeTensorMode) -> None:
        self._tracer = tracer
        self._fake = fake
        self._keys: dict[str, tuple[object, ...]] = {}
        self._kept: Counter[str] = Counter()  # bytes by section, without the block's output
        for section, block in blocks.items():
            block.forward = self._counting(section, block, block.forward)

    def _counting(self, section: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counting_forward(*inputs: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                self._keys[section] = key = _describe(block, inputs, options)
                if key not in _shares:
                    self._count(section, key, forward, inputs, options)
            return forward(*inputs, **options)

        return counting_forward

    def _count(
        self, section: str, key: tuple[object, ...], forward: Callable[..., Any], inputs: Any, options: Any
    ) -> None:
        saved: dict[int, torch.UntypedStorage] = {}

        def note(tensor: Tensor) -> Tensor:
            if not self._tracer.knows(tensor):  # not a weight or an input of the block
                storage = local(tensor).untyped_storage()
                saved[storage._cdata] = storage
            return tensor

        limits = dynamo_config.patch(recompile_limit=_MOST_SHAPES, fail_on_recompile_limit_hit=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        try:
            with set_aside_modes(), self._fake, limits, hooks:
                out = torch.compile(forward, backend=_BACKEND, dynamic=False)(*inputs, **options)
        except (RuntimeError, NotImplementedError) as error:  # of Dynamo, or of an operator without fake results
            _shares[key] = None
            LOGGER.info(f"activations of {section} are those of eager mode: {' '.join(str(error).split())[:200]}")
            return
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                saved.pop(local(tensor).untyped_storage()._cdata, None)
        self._kept[section] += sum(storage.nbytes() for storage in saved.values())

    def replace_kept(self, ops: Sequence[Op]) -> list[Op]:
        """Return a recorded step whose blocks keep what the compiler saves.

        Args:
            ops: Operators of a step in eager mode.
        """
        dropped: dict[str, int] = {}
        result: list[Op] = []
        for section, group in groupby(ops, key=lambda op: op.section):
            part = list(group)
            direction, _, place = section.partition("/")
            key = self._keys.get(f"forward/{place}")
            if key is None:
                result += part
            elif direction == "forward":
                if key not in _shares:
                    _shares[key] = _find_share(part, self._kept[section])
                part, dropped[place] = drop_kept(part, _shares[key] or 0.0, [ACTIVATIONS])
                result += part
            else:
                result += _scale_frees(part, dropped.pop(place, 0))
        return result


def _describe(block: nn.Module, inputs: Any, options: Any) -> tuple[object, ...]:
    """Return everything that decides what a block keeps per row of a batch."""
    modules = tuple((type(module), module.extra_repr(), module.training) for module in block.modules())
    weights = tuple((local(weight).shape, weight.dtype, weight.requires_grad) for weight in block.parameters())
    leaves = tree_leaves((inputs, options))
    shapes = tuple(
        (leaf.shape[1:], leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves
    )
    is_cast = torch.is_autocast_enabled("cpu")
    return modules, weights, shapes, is_cast and torch.get_autocast_dtype("cpu")


def _find_share(part: Sequence[Op], kept: float) -> float:
    """Return the part of a block's activations, without its output, that it does not keep."""
    _, everything = drop_kept(part, 1.0, [ACTIVATIONS])
    casts = sum(op.allocated.get(CASTS, 0) - op.freed.get(CASTS, 0) for op in part)  # the compiler keeps them, too
    return 1.0 - (kept - casts) / everything if everything else 0.0


def _scale_frees(part: Sequence[Op], num_bytes: int) -> list[Op]:
    """Return the backward pass of a block without freeing this much of its activations."""
    freed = sum(op.freed.get(ACTIVATIONS, 0) for op in part)
    if not (freed and num_bytes):
        return list(part)
    rest = 1.0 - num_bytes / freed
    return [
        replace(op, freed=op.freed | {ACTIVATIONS: round(rest * op.freed[ACTIVATIONS])})
        if ACTIVATIONS in op.freed
        else op
        for op in part
    ]
