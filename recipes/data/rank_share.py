"""A rank's share of a split that is read once: every world_size-th sample, as many on every rank. Free."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.loss import IGNORE_INDEX


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
