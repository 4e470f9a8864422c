"""Distribute computations on unsharded matrices over ranks, for sharded or replicated parameters.

Each result is computed by one rank and sent to the others, so all replicas get the same bits. For matrices with P
elements in total, each of N ranks sends and receives 2 P / N elements if they are sharded, and P if they are
replicated. Matrices are processed in rounds of N of about the same size to limit memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.optimizer.shards import Layout

Shape = tuple[int, int]  # rows R and columns C of an unsharded matrix


@dataclass(frozen=True, kw_only=True)
class WholeMatrices:
    """Matrices and their layout over ranks.

    Attributes:
        shapes: Shapes of the unsharded matrices, the same on every rank.
        layout: Which ranks hold which rows.
        device: Device for computation and communication.
        dtype: Dtype for computation and communication.
    """

    shapes: Sequence[Shape]
    layout: Layout
    device: torch.device
    dtype: torch.dtype

    def map(
        self, function: Callable[[int, Tensor], Tensor], *, read: Callable[[int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Apply a function to every matrix; collective, call on every rank.

        Args:
            function: index, matrix [R, C] -> result [R, C], the same dtype.
            read: index -> this rank's rows, [rows, ...], in any dtype and on any device.

        Yields:
            Index and this rank's rows of the result, [rows, C], each matrix once.
        """
        layout = self.layout
        # largest first, so that the matrices of a round take about equally long
        order = sorted(range(len(self.shapes)), key=lambda index: -self.shapes[index][0] * self.shapes[index][1])
        num_ranks = layout.num_shards * layout.num_replicas
        for start in range(0, len(order), num_ranks):
            members = order[start : start + num_ranks]
            # of each copy of the model, the matrices that it works on: the i-th on its i-th rank
            shares = [members[replica :: layout.num_replicas] for replica in range(layout.num_replicas)]
            result = self._map_share(shares[layout.replica], function, read)
            for share, rows in zip(shares, self._share_results(shares, result), strict=True):
                parts = rows.split(self._num_held(share))  # type: ignore[no-untyped-call]
                for index, part in zip(share, parts, strict=True):
                    yield index, part.view(-1, self.shapes[index][1])

    def _map_share(
        self, share: list[int], function: Callable[[int, Tensor], Tensor], read: Callable[[int], Tensor]
    ) -> Tensor:
        """Return this rank's rows of the results of its copy's matrices, one after the other, flat."""
        layout = self.layout
        rows = [read(index).to(self.device, self.dtype).reshape(-1) for index in share]
        if not share:
            return self._empty(0)
        if layout.shards is None:  # a copy of one rank: the rows are the matrix
            [index] = share
            return function(index, rows[0].view(self.shapes[index])).reshape(-1)
        num_idle = layout.num_shards - len(share)
        held = [*self._num_held(share), *[0] * num_idle]
        mine = share[layout.shard] if layout.shard < len(share) else None
        num_rows, num_columns = (0, 0) if mine is None else self.shapes[mine]
        gathered = [layout.num_rows(shard, of=num_rows) * num_columns for shard in range(layout.num_shards)]
        # the rows of the first rank, then those of the second, and so on: in order as they arrive
        whole = self._exchange(torch.cat(rows), held, gathered)  # [R C], or [0]
        if mine is not None:
            whole = function(mine, whole.view(num_rows, num_columns)).reshape(-1)
        return self._exchange(whole, gathered, held)

    def _num_held(self, indices: list[int]) -> list[int]:
        """Return the number of elements of each matrix on this rank."""
        shapes = [self.shapes[index] for index in indices]
        return [self.layout.num_rows(self.layout.shard, of=num_rows) * columns for num_rows, columns in shapes]

    def _exchange(self, values: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send every rank of the copy its part of a flat tensor, by number of elements; return what they sent here."""
        received = self._empty(sum(receive))
        dist.all_to_all_single(received, values, receive, send, group=self.layout.shards)
        return received

    def _share_results(self, shares: list[list[int]], result: Tensor) -> list[Tensor]:
        """Return this rank's rows of the results of every copy's matrices, flat."""
        layout = self.layout
        if layout.replicas is None:
            return [result]
        own = layout.replica
        results = [
            result if replica == own else self._empty(sum(self._num_held(share)))
            for replica, share in enumerate(shares)
        ]
        transfers = [
            dist.broadcast(rows, group=layout.replicas, group_src=replica, async_op=True)
            for replica, rows in enumerate(results)
            if rows.numel()
        ]
        for transfer in transfers:
            transfer.wait()
        return results

    def _empty(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=self.dtype, device=self.device)
