"""Memory-mapped token file, raw uint16 or uint32, or .npy; read in full once to check it."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np

from recipes.cache import build_once, open_cache_dir
from recipes.data.file_kinds import NUM_HEAD_BYTES
from recipes.data.found_files import describe_missing
from recipes.data.text.sequences import TokenWindows, check_length
from recipes.data.text.source import check_windows
from recipes.data.token_layout import (
    LLM_C,
    PERIOD,
    TokenLayout,
    explain_large_token,
    explain_wider_type,
    find_largest,
    find_wider_type,
    read_layout,
)
from recipes.errors import ConfigError
from recipes.home import expand_home
from recipes.tokenizer import Tokenizer

_CHUNK_TOKENS = 4 * 1024 * 1024
_LARGEST = "largest_tokens"
_DTYPES = ("uint16", "uint32")


@dataclass(kw_only=True)
class TokenFile:
    """Training reads `path` from its start; validation reads its tail, or all of `val_path`.

    Args:
        path: File of tokens; `~` stands for the home folder.
        dtype: Dtype of a raw file, little-endian; a .npy file and one of llm.c record their own.
        val_path: File of validation tokens; None: the tail of `path`.
        val_fraction: Length of that tail, as a fraction of all tokens.
        vocab_size: Every token must be below it.
        seq_len: Tokens per sample.
        cache_dir: Folder that caches the largest token of a file.

    Raises:
        ConfigError: `dtype`, `seq_len` or `val_fraction` is out of range.
    """

    sample_kind: ClassVar[str] = "tokens"
    tokenizer: ClassVar[Tokenizer | None] = None  # not stored in the file

    path: str
    dtype: Literal["uint16", "uint32"]
    val_path: str | None
    val_fraction: Annotated[float, "> 0, < 0.9"]
    vocab_size: Annotated[int, ">= 1"]
    seq_len: Annotated[int, ">= 1"]
    cache_dir: str

    def __post_init__(self) -> None:
        check_windows(seq_len=self.seq_len, val_fraction=self.val_fraction)
        if self.dtype not in _DTYPES:
            raise ConfigError(
                f"data.dtype={self.dtype}",
                "tokens are unsigned integers",
                "data.dtype=uint16 or uint32",
            )
        self._prepared: tuple[TokenWindows, TokenWindows] | None = None
        self._skips_header = False

    def prepare(self) -> None:
        """Check the files; their tokens are read only if a file is new or has changed.

        Raises:
            ConfigError: A file is missing, empty, truncated, too short, of the wrong type, or has tokens beyond the
                vocabulary.
        """
        if self._prepared is not None:
            return
        path, train = self._check("path", self.path)
        if self.val_path is None:
            cut = train.num_tokens - round(train.num_tokens * self.val_fraction)
            windows = self._windows(path, train, 0, cut), self._windows(path, train, cut, train.num_tokens)
        else:
            val_path, val = self._check("val_path", self.val_path)
            windows = (
                self._windows(path, train, 0, train.num_tokens),
                self._windows(val_path, val, 0, val.num_tokens),
            )
        if self.val_fraction < 1:
            check_length(windows[0], split="training", fix="data.path=<more tokens>")
        fix = "a larger data.val_fraction, or data.val_path=<more tokens>"
        check_length(windows[1], split="validation", fix=fix)
        self._prepared = windows

    def hold_out_all(self) -> None:
        """Use the whole file for validation; called before `prepare`, by modes that do not train."""
        self.val_path, self.val_fraction = None, 1.0

    @property
    def fingerprint(self) -> str:
        """Names and sizes of the files; their content is not hashed, because they may be hundreds of GB."""
        files = [self.path] if self.val_path is None else [self.path, self.val_path]
        sizes = [f"{Path(file).name}:{expand_home(file, 'data.path').stat().st_size}" for file in files]
        skips = f"/{LLM_C}" if self._skips_header else ""  # earlier versions read that header as tokens
        return f"{'+'.join(sizes)}/{self.dtype}/{self.val_fraction}{skips}"

    def describe(self) -> str:
        """Return the number of samples and the tokens per sample."""
        counts = f"{len(self.train()):,} training and {len(self.val()):,} validation samples"
        return f"{counts} of {self.seq_len} tokens in {self.path}"

    def train(self) -> TokenWindows:
        """Return the training samples."""
        assert self._prepared is not None, "prepare() comes first"
        return self._prepared[0]

    def val(self) -> TokenWindows:
        """Return the validation samples, the same for every seed."""
        assert self._prepared is not None, "prepare() comes first"
        return self._prepared[1]

    def _windows(self, path: Path, layout: TokenLayout, start: int, stop: int) -> TokenWindows:
        return TokenWindows(
            path,
            dtype=layout.dtype,
            seq_len=self.seq_len,
            start=start,
            stop=stop,
            byte_offset=layout.byte_offset,
        )

    def _check(self, name: str, value: str) -> tuple[Path, TokenLayout]:
        """Return a file and its layout, all of whose tokens are within the model's vocabulary."""
        key = f"data.{name}"
        path = expand_home(value, key).absolute()
        fix = f"{key}=<file of {self.dtype} tokens>"
        if not os.path.isfile(path):
            raise ConfigError(f"{key}={value}", describe_missing(path), fix)
        try:
            with path.open("rb") as file:
                head = file.read(NUM_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(f"{key}={value}", f"it cannot be read: {error.strerror}", fix) from error
        layout = read_layout(head, num_bytes=path.stat().st_size, dtype=self.dtype, name=value, key=key)
        by_position = largest_tokens(path, layout, cache_dir=open_cache_dir(self.cache_dir))
        if (bits := find_wider_type(by_position, layout, vocab_size=self.vocab_size)) is not None:
            raise explain_wider_type(key, value, layout.dtype, bits)
        if (largest := max(by_position)) >= self.vocab_size:
            raise explain_large_token(key, value, largest, vocab_size=self.vocab_size)
        self._skips_header |= layout.header == LLM_C
        return path, layout


def largest_tokens(path: Path, layout: TokenLayout, *, cache_dir: Path) -> list[int]:
    """Return the largest token at each position modulo four.

    The file is read in full once per (path, size, modification time).
    """
    status = path.stat()
    state = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {layout.dtype} {layout.byte_offset}"
    key = hashlib.blake2b(state.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    folder = cache_dir / "token_files" / key

    def build(temporary: Path) -> None:
        largest = [0] * PERIOD
        with path.open("rb") as file:
            file.seek(layout.byte_offset)
            dtype = np.dtype(layout.dtype).newbyteorder("<")
            for first in range(0, layout.num_tokens, _CHUNK_TOKENS):
                chunk = np.fromfile(file, dtype=dtype, count=min(_CHUNK_TOKENS, layout.num_tokens - first))
                largest = [*map(max, largest, find_largest(chunk))]
        (temporary / _LARGEST).write_text(" ".join(map(str, largest)), encoding="utf-8")

    build_once(folder, build, is_complete=_has_largest)
    return [int(text) for text in (folder / _LARGEST).read_text(encoding="utf-8").split()]


def _has_largest(folder: Path) -> bool:
    path = folder / _LARGEST
    numbers = path.read_bytes().split() if path.is_file() else []
    return len(numbers) == PERIOD and all(number.isdigit() for number in numbers)
