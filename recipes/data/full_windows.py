"""Base class of fixed-length samples in which every token has a target."""

from torch import Tensor
from torch.utils.data import Dataset


class FullWindows(Dataset[dict[str, Tensor]]):
    """Samples of L inputs and L targets.

    Args:
        seq_len: L.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.targets_per_sample: int | None = seq_len
        self.tokens_per_sample = seq_len
