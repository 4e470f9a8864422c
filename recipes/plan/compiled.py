"""Count what a compiled block keeps for its backward pass, by running torch's own partitioner on fake tensors.

`torch.compile` keeps less than eager mode: its partitioner recomputes elementwise operations, such as the float32
copies of a norm, in the kernels of the backward pass. A recorded step has the operators of eager mode, whose temporary
tensors are an upper bound; only what its blocks keep is replaced.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from recipes.parallel.placement import local
from recipes.plan.activations import drop_kept
from recipes.plan.trace import ACTIVATIONS, CASTS, KEPT, Op, StepTracer
from recipes.precision import Precision
from recipes.runtime.console import LOGGER
from recipes.torch_internals import FakeTensorMode, dynamo_config, partitioner_config, set_aside_modes, tree_leaves

_BACKEND = "aot_eager_decomp_partition"  # inductor's decompositions and partitioner, without its kernels
_MOST_SHAPES = 256  # of one class of block in a process; by default torch runs the ninth one in eager mode
# Fractions of what a block keeps in eager mode that it does not keep compiled, by all that decides them. They do not
# depend on the size of the batch, so that a search over micro-batches compiles once
_shares: dict[tuple[object, ...], dict[str, float]] = {}


class CompiledBlocks:
    """Counts what the blocks of a model keep, while their step is recorded.

    Args:
        blocks: Blocks that run compiled, by section of the tracer; their `forward` is wrapped in place.
        tracer: Tracer of the step.
        fake: Mode of its tensors.
        precision: Precision of the run, whose own products are compiled, although others are recorded.
    """

    def __init__(
        self, blocks: dict[str, nn.Module], tracer: StepTracer, fake: FakeTensorMode, precision: Precision
    ) -> None:
        self._tracer = tracer
        self._fake = fake
        self._precision = precision
        self._keys: dict[str, tuple[object, ...]] = {}
        self._counted_in: dict[tuple[object, ...], str] = {}  # the first section of each kind of block
        self._kept: Counter[str] = Counter()  # bytes by section, without the block's output
        for section, block in blocks.items():
            block.forward = self._counting(section, block, block.forward)

    def _counting(self, section: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counting_forward(*inputs: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                self._keys[section] = key = (self._precision, *_describe(block, inputs, options))
                if key not in _shares and self._counted_in.setdefault(key, section) == section:
                    with _products_of(self._precision, block):
                        self._count(section, key, partial(forward, *inputs, **options))
            return forward(*inputs, **options)

        return counting_forward

    def _count(self, section: str, key: tuple[object, ...], run: partial[Any]) -> None:
        saved: dict[int, torch.UntypedStorage] = {}

        def note(tensor: Tensor) -> Tensor:
            if not self._tracer.knows(tensor):  # not a weight or an input of the block
                storage = local(tensor).untyped_storage()
                saved[storage._cdata] = storage
            return tensor

        limits = dynamo_config.patch(recompile_limit=_MOST_SHAPES, fail_on_recompile_limit_hit=True)
        no_budget = partitioner_config.patch(activation_memory_budget=1.0)  # `keep_budget` models it
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        try:
            with set_aside_modes(), self._fake, limits, no_budget, hooks:
                out = torch.compile(run.func, backend=_BACKEND, dynamic=False)(*run.args, **run.keywords)
        except (RuntimeError, NotImplementedError) as error:  # of Dynamo, or of an operator without fake results
            _shares[key] = {}
            LOGGER.info(f"activations of {section} are those of eager mode: {' '.join(str(error).split())[:200]}")
            return
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for node in _walk(outputs):
            for tensor in getattr(node, "_tensors_no_vc_check", ()):  # saved past the hooks (torch 2.13)
                note(tensor)
        for tensor in outputs:
            saved.pop(local(tensor).untyped_storage()._cdata, None)
        self._kept[section] += sum(storage.nbytes() for storage in saved.values())

    def replace_kept(self, ops: Sequence[Op]) -> list[Op]:
        """Return a recorded step whose blocks keep what the compiler saves.

        Args:
            ops: Operators of a step in eager mode.
        """
        dropped: dict[str, Counter[str]] = {}
        result: list[Op] = []
        for section, group in groupby(ops, key=lambda op: op.section):
            part = list(group)
            direction, _, place = section.partition("/")
            key = self._keys.get(f"forward/{place}")
            if key is None:
                result += part
            elif direction == "forward":
                if key not in _shares:
                    _shares[key] = self._find_shares(part, self._kept[section])
                part, dropped[place] = drop_kept(part, _shares[key])
                result += part
            else:
                result += _keep_frees(part, dropped.pop(place, Counter()))
        return result

    def _find_shares(self, part: Sequence[Op], kept: float) -> dict[str, float]:
        """Return the fractions of what a block keeps in eager mode that it does not keep, by category.

        Args:
            part: Its forward pass.
            kept: Bytes that it keeps, without its output.
        """
        _, eager = drop_kept(part, dict.fromkeys(KEPT, 1.0))
        # both modes keep autocast's copies of the weights
        shares = {CASTS: 1.0 if self._precision.replaces_products else 0.0}
        casts = (1.0 - shares[CASTS]) * eager[CASTS]
        return shares | ({ACTIVATIONS: 1.0 - (kept - casts) / eager[ACTIVATIONS]} if eager[ACTIVATIONS] else {})


def _walk(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the autograd graph of tensors."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


@contextlib.contextmanager
def _products_of(precision: Precision, block: nn.Module) -> Iterator[None]:
    """Give a block the linear layers of a precision."""
    places = [(parent, name, child) for parent in block.modules() for name, child in parent.named_children()]
    precision.convert_products(block, shards_weights=False)
    try:
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)


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


def _keep_frees(part: Sequence[Op], dropped: Mapping[str, int]) -> list[Op]:
    """Return the backward pass of a block that does not free what it no longer keeps, in bytes by category."""
    rest = {
        name: 1.0 - num_bytes / freed
        for name, num_bytes in dropped.items()
        if (freed := sum(op.freed.get(name, 0) for op in part))
    }
    return [
        replace(op, freed={name: round(rest.get(name, 1.0) * size) for name, size in op.freed.items()}) for op in part
    ]
