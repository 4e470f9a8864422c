"""Keep the results of random operations in a compiled block: torch's partitioner may recompute them with other numbers.

With `activation_memory_budget` below 1, torch 2.13 recomputes dropout from a new seed, and gradients are those of
another mask than the loss (pytorch#190758, #190717).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy


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
