"""Samples of one length in which every token has a target: windows of text, of files, of noise."""

from torch import Tensor
from torch.utils.data import Dataset


class FullWindows(Dataset[dict[str, Tensor]]):
    """Samples of L inputs and L targets.

    Args:
        seq_len: L.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    @property
    def targets_per_sample(self) -> int:
        """Every position has a target."""
        return self.seq_len

    @property
    def tokens_per_sample(self) -> int:
        """Every input is a token."""
        return self.seq_len
