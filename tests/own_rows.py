"""Rows of four numbers, and whether the product of the first two is positive."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Rows(Dataset[dict[str, Tensor]]):
    """Samples with inputs [4] float and targets [] int64."""

    def __init__(self, *, number: int) -> None:
        self._rows = torch.randn(number, 4, generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index]
        return {"inputs": row, "targets": (row[0] * row[1] > 0).long()}
