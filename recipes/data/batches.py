"""Micro-batches told the number of targets of their global batch before the first backward."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.numerics.loss import IGNORE_INDEX, count_targets

Batch = dict[str, Any]


def with_num_targets(
    micro_batches: Iterable[Batch],
    *,
    num_micro_batches: int,
    targets_per_window: int | None,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> Iterator[Batch]:
    """Add `num_targets`, the targets of the whole global batch, to each of its micro-batches.

    A sum of losses divided by it has the exact gradient of one large batch under every engine, also under those
    whose gradients cannot be reached afterwards. Where each sample carries the same number of targets it is
    arithmetic and nothing is held back; else one window of micro-batches is read ahead, on the host.

    Args:
        micro_batches: This rank's micro-batches, in order.
        num_micro_batches: Micro-batches per window, that is per optimizer step.
        targets_per_window: Targets of a global batch where constant, else None.
        sum_over_ranks: Adds a 0-dim tensor over all ranks; called once a window where the number varies.

    Yields:
        The micro-batches; those of a last, partial window are dropped where the number varies.
    """
    stream = iter(micro_batches)
    if targets_per_window is not None:
        for batch in stream:
            yield batch | {"num_targets": targets_per_window}
        return
    while len(window := list(islice(stream, num_micro_batches))) == num_micro_batches:
        counts = [count_targets(batch["targets"]) for batch in window]
        # a global batch without any target has loss 0 and gradient 0, not 0 / 0
        num_targets = sum_over_ranks(sum(counts[1:], start=counts[0])).clamp(min=1)
        for batch in window:
            yield batch | {"num_targets": num_targets}


class RankShare(Dataset[dict[str, Tensor]]):
    """Samples rank, rank + N, rank + 2 N … of N ranks.

    Where they do not divide, the last ranks get a sample more whose targets carry no loss: forward passes of
    sharded models are collectives, so that every rank must make the same number of them.

    Args:
        dataset: The whole split.
        rank: Of this process, from 0.
        world_size: N.
    """

    def __init__(self, dataset: Any, *, rank: int, world_size: int) -> None:
        self._dataset = dataset
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return -(-len(self._dataset) // self._world_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        position = index * self._world_size + self._rank
        if position < len(self._dataset):
            sample: dict[str, Tensor] = self._dataset[position]
            return sample
        sample = self._dataset[0]
        return sample | {
            "targets": torch.full_like(torch.as_tensor(sample["targets"]), IGNORE_INDEX)
        }
