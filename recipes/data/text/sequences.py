"""Fixed windows over a memory-mapped file of token ids: one read of the page cache per sample.

Letters: L tokens per sample, B samples.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.data.full_windows import FullWindows
from recipes.errors import ConfigError


class TokenWindows(FullWindows):
    """Sample i reads tokens [i*L, i*L + L) and predicts the successor of each; an incomplete last window is dropped.

    Picklable: each process opens its own map when it first reads a sample.

    Args:
        path: File of little-endian token ids.
        dtype: "uint16" or "uint32".
        seq_len: L.
        start: First token.
        stop: One past the last token.
        byte_offset: Size of the header before token 0.
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
        super().__init__(seq_len)
        assert 0 <= start <= stop, (start, stop)
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.start = start
        self.stop = stop
        self.byte_offset = byte_offset
        self._tokens: NDArray[np.unsignedinteger] | None = None

    def __len__(self) -> int:
        """Return the number of complete windows, each with one more token for its last target."""
        return max(0, (self.stop - self.start - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample: inputs and targets, [L] int64."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return B samples with one gather; a DataLoader prefers this method to `__getitem__`."""
        starts = np.array([self._first_token(index) for index in indices], dtype=np.int64)  # [B]
        offsets = starts[:, None] + np.arange(self.seq_len + 1)  # [B, L+1]
        tokens = torch.from_numpy(self._map()[offsets].astype(np.int64))  # [B, L+1]
        return [{"inputs": row[:-1], "targets": row[1:]} for row in tokens]

    def _first_token(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.start + (index % len(self)) * self.seq_len

    def _map(self) -> NDArray[np.unsignedinteger]:
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.byte_offset, shape=(self.stop,))
        return self._tokens

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the memory map, which pickle would turn into a copy of the file."""
        return {**self.__dict__, "_tokens": None}


def check_length(windows: TokenWindows, *, split: str, fix: str) -> TokenWindows:
    """Return the windows if there is at least one.

    Args:
        windows: Windows of one split.
        split: "training" or "validation", for the error.
        fix: Override that gives more tokens.

    Raises:
        ConfigError: The split is shorter than one sample; the fix names the longest `seq_len` that fits.
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
