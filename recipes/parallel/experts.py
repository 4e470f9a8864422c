"""Expert parallelism: N ranks split the experts of every layer and exchange tokens by all-to-all.

The ranks are also data-parallel: the router and the rest of a block see only a rank's own tokens. Rows for an expert
are sent to its rank and the results are sent back (GShard, arXiv 2006.16668). Dropless: a rank receives all rows for
its experts. So the host synchronizes on the row counts once per layer in the forward pass, as every dropless exchange
does; the backward pass reuses them.

Shapes: E experts, N ranks, e = E / N experts of a rank, R rows of this rank's tokens, S rows for its experts, W hidden
size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typing_extensions import override

from recipes.mesh import Mesh
from recipes.numerics.collectives import ExchangeRows, exchange_rows
from recipes.numerics.grouped_linear import GroupedLinear, grouped_linear
from recipes.numerics.linear import get_product_dtype
from recipes.numerics.permutation import Order, permute_rows, sort_rows


class ExpertRanks:
    """Expert-parallel ranks; one object for all layers of a model.

    Args:
        group: Process group of the ranks; the first rank has the first experts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()

    # the number of rows varies with routing: the compiler would recompile for each number
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute(self, rows: Tensor, counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Compute this rank's rows with the experts of all ranks; return [R, W].

        Args:
            rows: [R, W], sorted by expert.
            counts: [E] int64, rows per expert.
            experts: Computes rows [S, W], sorted by expert, given counts [e].
        """
        per_rank = [len(counts) // self.size] * self.size
        theirs = exchange_rows(counts, self.group, num_sent=per_rank, num_received=per_rank)
        theirs = theirs.view(self.size, -1)  # [N, e], from each rank for this rank's experts
        sizes = torch.stack([counts.view(self.size, -1).sum(dim=1), theirs.sum(dim=1)])  # [2, N]
        num_sent, num_received = self.read_sizes(sizes, num_rows=len(rows))
        received = self._exchange(rows, num_sent, num_received)  # [S, W], by rank and then by expert
        order = _sort_by_expert(theirs, num_rows=len(received))
        out = experts(permute_rows(received, order.forward, order.backward), theirs.sum(dim=0))
        return self._exchange(permute_rows(out, order.backward, order.forward), num_received, num_sent)

    def read_sizes(self, sizes: Tensor, *, num_rows: int) -> tuple[list[int], list[int]]:
        """Return the rows sent to and received from each rank on the host, which synchronizes.

        Args:
            sizes: [2, N] int64.
            num_rows: R.
        """
        num_sent, num_received = sizes.tolist()
        assert sum(num_sent) == num_rows, f"{sum(num_sent)} != {num_rows} rows"
        return num_sent, num_received

    def _exchange(self, rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        out: Tensor = ExchangeRows.apply(rows, self.group, num_sent, num_received, get_product_dtype(rows))
        return out


def _sort_by_expert(counts: Tensor, *, num_rows: int) -> Order:
    """Return the permutation of rows from rank-major to expert-major order.

    Args:
        counts: [N, e], rows from each rank for each expert.
        num_rows: S, the sum of counts.
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))  # [N e]
    return sort_rows(experts.repeat_interleave(counts.flatten(), output_size=num_rows))  # [S]


class DividedGroupedLinear(GroupedLinear):
    """Grouped linear layer whose groups are split over ranks."""

    @override
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        return grouped_linear(x, self.weight.to_local(), ends)


def make_expert_mesh(mesh: Mesh, device_type: str) -> DeviceMesh | None:
    """Create the mesh for expert weights: pipeline stages, replicas, shards of the same experts, other experts.

    A collective. The other weights use a different mesh, in which they are sharded over all of these ranks.

    Args:
        mesh: Mesh of all ranks.
        device_type: torch device type.

    Returns:
        The mesh; None without expert parallelism.
    """
    if mesh.expert == 1:
        return None
    sizes = {"pipeline": mesh.pipeline, "replicate": mesh.replicate}
    shape = {name: size for name, size in sizes.items() if size > 1}
    shape |= {"expert_shard": mesh.expert_shard, "expert": mesh.expert}
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the experts of a model over the ranks of a mesh, in place.

    Args:
        model: Unsharded model on the meta device.
        mesh: One-dimensional mesh; its size divides the number of experts.
    """
    ranks = ExpertRanks(mesh.get_group())
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if isinstance(module, GroupedLinear):
            divided = distribute_tensor(module.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.weight = nn.Parameter(divided, requires_grad=module.weight.requires_grad)
            module.__class__ = DividedGroupedLinear
        elif hasattr(module, "expert_ranks"):
            module.expert_ranks = ranks
