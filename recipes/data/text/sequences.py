"""Fixed windows over a memory-mapped file of token ids: one read of the page cache per sample.

Shapes: L tokens per sample, B samples.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.data.full_windows import FullWindows
from recipes.errors import ConfigError, shell
from recipes.files import count

_MIN_TOKENS = 4  # an input and a target for each split
_MAX_SHARE = 0.5  # for validation, in what to type
_SURE_SHARE = 0.2  # of whole documents: a smaller one may again find none of them


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
        vocab_size: Every token must be below it, which is checked as they are read; None: they were checked before.
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
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(seq_len)
        assert 0 <= start <= stop, (start, stop)
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.start = start
        self.stop = stop
        self.byte_offset = byte_offset
        self.vocab_size = vocab_size
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
        read = self._map()[offsets]  # [B, L+1]
        if self.vocab_size is not None and (largest := int(read.max(initial=0))) >= self.vocab_size:
            reason = (
                f"the cached tokens are damaged: id {largest} is outside the vocabulary of {self.vocab_size} tokens"
            )
            fix = f"{shell('rm -r', self.path.parent)}, then the same command, which tokenizes again"
            raise ConfigError(str(self.path), reason, fix)
        tokens = torch.from_numpy(read.astype(np.int64))  # [B, L+1]
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


def check_splits(train: TokenWindows, val: TokenWindows, *, val_fraction: float | None, cuts: bool, more: str) -> None:
    """Check that both splits have at least one sample.

    Args:
        train: Windows of the training split.
        val: Windows of the validation split.
        val_fraction: Fraction for validation that divided them; None: they are of different files.
        cuts: Whether validation is the tail of the tokens, so that every fraction can be had.
        more: Override that gives more tokens.

    Raises:
        ConfigError: A split is shorter than one sample; each remedy makes both long enough.
    """
    split, short = ("training", train) if not len(train) else ("validation", val)
    if len(short):
        return
    num_train, num_val = (windows.stop - windows.start for windows in (train, val))
    seq_len, total, shortest = train.seq_len, num_train + num_val, min(num_train, num_val)
    setting = f"seq_len={seq_len}" if val_fraction is None else f"seq_len={seq_len} data.val_fraction={val_fraction:g}"
    reason = f"the {split} split has {count(short.stop - short.start, 'token')} and one sample takes {seq_len + 1}"
    fixes = [f"seq_len={shortest - 1} or less"] if shortest > 1 else []
    share = math.ceil(100 * (seq_len + 1) / max(total, 1)) / 100
    if val_fraction is not None and split == "validation" and val_fraction < share <= _MAX_SHARE:
        fixes.append(f"data.val_fraction={share:g}" if cuts else f"data.val_fraction={max(share, _SURE_SHARE):g}")
    elif val_fraction is not None and cuts and total >= _MIN_TOKENS:
        fixes = [f"seq_len={total // 2 - 1} data.val_fraction=0.5"]
    raise ConfigError(setting, reason, ", or ".join([*fixes, more]))
