"""Ranks that are threads of this process: collectives over several ranks in milliseconds, and small models for them.

For arithmetic between ranks; engines keep state per process and therefore need processes (`tests/parity`).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

NUM_RANKS = 4
LAYOUTS = ("ddp", "fsdp", "hsdp")
_KERNELS = {
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def run_on_threads(function: Callable[[int], Any], *, num_ranks: int = NUM_RANKS) -> list[Any]:
    """Call a function of the rank on every rank of one process group; return the results in rank order."""
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []
    # text generation selects attention kernels process-wide, and threads would restore them in the order they end
    kernels = [kernel for kernel, is_enabled in _KERNELS.items() if is_enabled()]
    with _threads_as_ranks(), torch.compiler.set_stance("default"), sdpa_kernel(kernels):
        store, num_threads = dist.HashStore(), torch.get_num_threads()

        def work(rank: int) -> None:
            torch.set_num_threads(num_threads)  # another number of threads would change the summation order of matmuls
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                ProcessLocalGroup.exception_handle(error)  # the others are waiting in a collective
            finally:
                dist.destroy_process_group()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


@contextmanager
def _threads_as_ranks() -> Iterator[None]:
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _install_threaded_pg()
    try:
        yield
    finally:
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        ProcessLocalGroup.reset()


class Layer(nn.Module):
    """Matrices with fewer rows than ranks, with unevenly sharded rows, and three fused in one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 10)
        self.up = nn.Linear(7, 3)
        self.out = nn.Linear(5, 1)
        self.conv = nn.Conv2d(2, 5, 3, bias=False)

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (4, 3, 3)}


class Net(nn.Module):
    """Provides parameters for an optimizer; computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Layer(), Layer()])
        generator = torch.Generator().manual_seed(0)  # threads share torch's default generator
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)


def train(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    layout: str | None = None,
    *,
    num_steps: int = 3,
    skips: int | None = None,
) -> tuple[list[Tensor], Any]:
    """Step an optimizer with random gradients, as the calling rank.

    Args:
        make: Creates the optimizer for a model.
        layout: How the model is sharded over the ranks; None keeps it unsharded on this rank.
        num_steps: Number of steps.
        skips: Step in which no parameter has a gradient; None for no such step.

    Returns:
        The unsharded parameters, and the optimizer.
    """
    model = Net()
    place = _find_place(layout)
    if place is not None:
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(place(parameter.detach())))
    optimizer: Any = make(model)
    if layout == "ddp" and hasattr(optimizer, "replicas"):
        optimizer.replicas = dist.group.WORLD
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if step == skips else grad if place is None else place(grad)
        optimizer.step()
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters], optimizer


def _find_place(layout: str | None) -> Callable[[Tensor], Tensor] | None:
    if layout in (None, "ddp"):
        return None
    shape = (NUM_RANKS,) if layout == "fsdp" else (NUM_RANKS // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    placements = [Replicate(), Shard(0)][-len(shape) :]
    return lambda tensor: distribute_tensor(tensor.clone(), mesh, placements)
