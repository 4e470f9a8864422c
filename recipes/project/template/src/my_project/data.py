"""A torch Dataset in memory; one that reads files looks the same."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

NUM_CLASSES = 3


class Spirals(Dataset[tuple[Tensor, int]]):
    """Points on three spirals, in a square of about 2 x 2; the arguments are settings of conf/data/spirals.yaml."""

    def __init__(self, *, num_points: int, noise: float, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.classes = torch.arange(num_points) % NUM_CLASSES  # [N]
        radius = torch.rand(num_points, generator=draw)  # [N]
        angle = 4 * radius + self.classes * 2 * torch.pi / NUM_CLASSES + noise * torch.randn(num_points, generator=draw)
        self.points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)  # [N, 2]

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.classes[index])
