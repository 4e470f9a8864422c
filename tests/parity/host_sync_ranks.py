"""Train while counting the host's reads of tensors and the graphs of torch.compile.

python host_sync_ranks.py <cases.json> <results.json>. Blocks are traced, and their graphs run eagerly: no code is
generated.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import recipes  # noqa: E402, F401  # isort: skip  # before Lightning, as in conftest.py

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from host_reads import HostReads  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import composed_config, resolved  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from recipes.build import build  # noqa: E402

_compile = torch.nn.Module.compile
_block_graphs: list[torch.fx.GraphModule] = []


def _run_eagerly(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    _block_graphs.append(graph)
    return graph.forward


def _trace(module: torch.nn.Module, *, dynamic: bool | None, mode: str) -> None:
    _compile(module, backend=_run_eagerly, dynamic=dynamic)


_compile_function = torch.compile


def _trace_forward(function: Any, **options: Any) -> Any:
    """Trace the forward pass of a block, whose hooks stay outside; compile anything else."""
    if isinstance(getattr(function, "__self__", None), torch.nn.Module):
        return _compile_function(function, backend=_run_eagerly, dynamic=options["dynamic"])
    return _compile_function(function, **options)


torch.nn.Module.compile = _trace  # type: ignore[assignment,method-assign]
torch.compile = _trace_forward  # type: ignore[assignment]


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.compiler.reset()
    counters.clear()
    _block_graphs.clear()
    run = build(resolved(composed_config(*case["overrides"]), folder))
    reads = HostReads(log_every=case["log_every"])
    run.trainer.callbacks.insert(0, reads)  # type: ignore[attr-defined]
    with reads.counting():
        run.trainer.fit(run.task, datamodule=run.data)
    of_rank = {
        "places": sorted(reads.places),
        "num_logged": reads.num_logged,
        "graph_breaks": sorted(counters["graph_break"]),
        "graphs": len(_block_graphs),
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, of_rank)
    return {"ranks": of_ranks}


if __name__ == "__main__":
    run_all(run_case)
