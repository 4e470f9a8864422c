"""Fixed windows over a memory-mapped file of token ids: one page-cache read a sample, no copy held.

Letters: L tokens a sample, B samples.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes.errors import ConfigError


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Sample i reads tokens [i*L, i*L + L) and predicts each one's successor; a rest is left out.

    Picklable: the map is opened by the process that first reads from it and never travels.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: str,
        seq_len: int,
        start: int,
        stop: int,
        byte_offset: int = 0,
    ) -> None:
        """Cut tokens [start, stop) of a file into windows.

        Args:
            path: Little-endian token ids, one after the other.
            dtype: "uint16" or "uint32".
            seq_len: L.
            start: First token.
            stop: One past the last token.
            byte_offset: Bytes before token 0, a header.
        """
        assert 0 <= start <= stop, (start, stop)
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.seq_len = seq_len
        self.start = start
        self.stop = stop
        self.byte_offset = byte_offset
        self._tokens: NDArray[np.unsignedinteger] | None = None

    @property
    def targets_per_sample(self) -> int:
        """Every position has a target."""
        return self.seq_len

    @property
    def tokens_per_sample(self) -> int:
        """L."""
        return self.seq_len

    def __len__(self) -> int:
        """Whole windows, each with the one token more that its last target needs."""
        return max(0, (self.stop - self.start - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample: inputs and targets, [L] int64."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Many samples out of one gather; a DataLoader calls this by itself."""
        firsts = np.array([self._first_token(index) for index in indices], dtype=np.int64)
        where = firsts[:, None] + np.arange(self.seq_len + 1)  # [B, L+1]
        block = torch.from_numpy(self._map()[where].astype(np.int64))  # [B, L+1]
        return [{"inputs": row[:-1], "targets": row[1:]} for row in block]

    def _first_token(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.start + (index % len(self)) * self.seq_len

    def _map(self) -> NDArray[np.unsignedinteger]:
        if self._tokens is None:
            self._tokens = np.memmap(
                self.path, dtype=self.dtype, mode="r", offset=self.byte_offset, shape=(self.stop,)
            )
        return self._tokens

    def __getstate__(self) -> dict[str, object]:
        """Everything but the map, which pickle would turn into a copy of the file."""
        return {**self.__dict__, "_tokens": None}


def check_length(windows: TokenWindows, *, split: str, fix: str) -> TokenWindows:
    """Give the windows back if there is at least one.

    Raises:
        ConfigError: The split is shorter than one sequence; with the longest `seq_len` that would fit.
    """
    if len(windows) > 0:
        return windows
    num_tokens = windows.stop - windows.start
    shorter = f"seq_len={num_tokens - 1} or less, or " if num_tokens > 1 else ""
    raise ConfigError(
        f"seq_len={windows.seq_len}",
        f"the {split} split has {num_tokens} tokens and one sample takes {windows.seq_len + 1}",
        f"{shorter}{fix}",
    )
