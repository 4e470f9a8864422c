"""torch.compile per block: all blocks of a model share one compilation, which takes about ten seconds on a CPU.

A size that changes between calls, such as the length of padded rows, becomes dynamic once a second value is seen: one
more compilation serves every other value, too.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from recipes.torch_internals import CallbackTrigger, callback_handler, counters, dynamo_config


def compile_blocks(
    blocks: Collection[nn.Module],
    *,
    mode: str,
    leaves_out_hooks: bool = False,
    has_fixed_shapes: bool = False,
    backend: str | None = None,
) -> None:
    """Compile each block in place.

    Args:
        blocks: Modules of the same class, or of one class per tower.
        mode: `mode` of `torch.compile`.
        leaves_out_hooks: Whether the engine's hooks of a block cannot be traced, and are to run around its graph.
        has_fixed_shapes: Whether each block is called with inputs of one shape. Blocks of one class have other sizes in
            each stage of a network of images; inductor cannot lower a convolution whose size is dynamic (torch 2.13).
        backend: Backend of `torch.compile` instead of inductor; it has no modes.
    """
    # DDPOptimizer would split blocks at bucket boundaries; per-block graphs already overlap the all-reduce
    dynamo_config.optimize_ddp = False

    # the blocks share one code object: every variant of any block (training, evaluation, a first size, changing sizes)
    # counts toward its recompile limit, beyond which torch falls back to eager
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 4 * len(blocks))
    options: dict[str, Any] = {"dynamic": False if has_fixed_shapes else None}
    options |= {"mode": mode} if backend is None else {"backend": backend}
    for block in blocks:
        if leaves_out_hooks:
            block.forward = torch.compile(block.forward, **options)
        else:
            block.compile(**options)


def is_compiled(block: nn.Module) -> bool:
    """Return whether `compile_blocks` has compiled a block."""
    return block._compiled_call_impl is not None or hasattr(block.forward, "_torchdynamo_orig_callable")


class CompilationCounter:
    """Counts what torch.compile does in this process between `attach` and `detach`."""

    def __init__(self) -> None:
        self._graphs = self._breaks = self._recompilations = 0

    @property
    def is_attached(self) -> bool:
        """Whether torch calls this counter."""
        return self._on_start in callback_handler.start_callbacks

    def attach(self) -> None:
        """Start counting from zero; torch then calls this counter, in the whole process, until `detach`."""
        self.detach()
        self._graphs, self._breaks = _read_counters()
        self._recompilations = 0
        callback_handler.register_start_callback(self._on_start)

    def _on_start(self, arguments: Any) -> None:
        _, _, attempt = str(arguments.compile_id).partition("/")  # "2/1": the second compilation of the third function
        is_traced = arguments.callback_trigger is CallbackTrigger.DYNAMO
        self._recompilations += is_traced and attempt.partition("_")[0] not in ("", "0")

    def detach(self) -> None:
        """Stop counting; a second call does nothing."""
        if self.is_attached:
            callback_handler.remove_start_callback(self._on_start)

    def describe(self) -> str:
        """Return the number of graphs, and how many of them another size, mode or layer needed, in one line."""
        graphs, breaks = (
            now - before for now, before in zip(_read_counters(), (self._graphs, self._breaks), strict=True)
        )
        return (
            f"compile: {_count(graphs, 'graph')}, {_count(self._recompilations, 'recompilation')},"
            f" {_count(breaks, 'graph break')}"
        )


def _read_counters() -> tuple[int, int]:
    """Return the graphs and the graph breaks of this process so far."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
