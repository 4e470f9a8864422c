"""Expert parallelism: N ranks divide the experts of every layer, and send each other the rows that these compute.

The ranks have samples of their own, too: the router and everything else of a block see a rank's own tokens. Only the
rows of an expert go to the rank that has it, and what it makes of them comes back (GShard, arXiv 2006.16668). Dropless:
a rank gets as many rows as there are for its experts. So the host waits for their number once a layer and forward pass,
as every dropless exchange between ranks does; the backward pass knows it.

Shapes: E experts, N ranks, e = E / N experts of a rank, R rows of this rank's tokens, S rows for its experts, W hidden
size.
"""

from collections.abc import Callable

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
    """The ranks that divide the experts; one object for all layers of a model.

    Args:
        group: The ranks; the first has the first experts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()

    # there are as many rows as tokens go to a rank: the compiler would compile each number of them
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute(self, rows: Tensor, counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return what the experts of all ranks make of this rank's rows, [R, W].

        Args:
            rows: [R, W], by expert.
            counts: [E] int64, rows of each expert.
            experts: Computes rows [S, W], by expert, of which there are as many as counts [e] say.
        """
        per_rank = [len(counts) // self.size] * self.size
        theirs = exchange_rows(counts, self.group, num_sent=per_rank, num_received=per_rank)
        theirs = theirs.view(self.size, -1)  # [N, e], of each rank for the experts of this one
        sizes = torch.stack([counts.view(self.size, -1).sum(dim=1), theirs.sum(dim=1)])  # [2, N]
        num_sent, num_received = self.read_sizes(sizes, num_rows=len(rows))
        received = self._exchange(rows, num_sent, num_received)  # [S, W], by rank and then by expert
        order = _sort_by_expert(theirs, num_rows=len(received))
        out = experts(permute_rows(received, order.forward, order.backward), theirs.sum(dim=0))
        return self._exchange(permute_rows(out, order.backward, order.forward), num_received, num_sent)

    def read_sizes(self, sizes: Tensor, *, num_rows: int) -> tuple[list[int], list[int]]:
        """Return rows for each rank, and from each rank, on the host, which waits for them.

        Args:
            sizes: [2, N] int64.
            num_rows: R.
        """
        num_sent, num_received = sizes.tolist()
        assert sum(num_sent) == num_rows, f"{sum(num_sent)} != {num_rows} rows"
        return num_sent, num_received

    def _exchange(self, rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        out: Tensor = ExchangeRows.apply(  # type: ignore[no-untyped-call]
            rows, self.group, num_sent, num_received, get_product_dtype(rows)
        )
        return out


def _sort_by_expert(counts: Tensor, *, num_rows: int) -> Order:
    """Return the order by expert, and within an expert by rank, of rows by rank and expert.

    Args:
        counts: [N, e], rows of each rank for each expert.
        num_rows: S, their sum.
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))  # [N e]
    return sort_rows(experts.repeat_interleave(counts.flatten(), output_size=num_rows))  # [S]


class DividedGroupedLinear(GroupedLinear):
    """A linear layer for each group of rows, of which each rank has some groups."""

    @override
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        return grouped_linear(x, self.weight.to_local(), ends)


def make_expert_mesh(mesh: Mesh, device_type: str) -> DeviceMesh | None:
    """Return the ranks by the experts that they have: other layers, replicas, shards of the same, and other experts.

    A collective. It is not the mesh of the other weights, whose shards are all of these ranks.

    Args:
        mesh: Of all ranks.
        device_type: Of torch.

    Returns:
        None where no ranks divide experts.
    """
    if mesh.expert == 1:
        return None
    sizes = {"pipeline": mesh.pipeline, "replicate": mesh.replicate}
    shape = {name: size for name, size in sizes.items() if size > 1}
    shape |= {"expert_shard": mesh.expert_shard, "expert": mesh.expert}
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of a model over the ranks of a mesh, in place.

    Args:
        model: Not yet sharded, on the meta device.
        mesh: One-dimensional; its size divides the number of experts.
    """
    ranks = ExpertRanks(mesh.get_group())
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            divided = distribute_tensor(module.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.weight = nn.Parameter(divided, requires_grad=module.weight.requires_grad)
            module.__class__ = DividedGroupedLinear
        elif hasattr(module, "expert_ranks"):
            module.expert_ranks = ranks  # type: ignore[assignment]
