"""Memory-mapped token file, raw uint16 or uint32, or .npy; read in full once to check it."""

import copy
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from recipes.cache import build_once, open_cache_dir
from recipes.data.file_kinds import NUM_HEAD_BYTES
from recipes.data.found_files import describe_missing
from recipes.data.text.sequences import TokenWindows, check_splits
from recipes.data.text.source import check_windows
from recipes.data.text.token_cache import SPLIT_TEXT
from recipes.data.token_layout import (
    TokenLayout,
    explain_large_token,
    explain_two_types,
    explain_type,
    file_key,
    find_bits,
    log_overruled,
    read_layout,
    reject_big_endian,
    sample_bytes,
)
from recipes.errors import ConfigError
from recipes.files import count
from recipes.home import expand_home
from recipes.tokenizer import Tokenizer

_CHUNK_TOKENS = 4 * 1024 * 1024
_LARGEST = "largest_token"
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
        self._is_same = False  # whether the file of validation tokens is that of all others

    def prepare(self) -> None:
        """Check the files; their tokens are read only if a file is new or has changed.

        Raises:
            ConfigError: A file is missing, empty, truncated, too short, of the wrong type, or has tokens beyond the
                vocabulary.
        """
        if self._prepared is not None:
            return
        files = [self._open("path", self.path)]
        if self.val_path is not None:
            files.append(self._open("val_path", self.val_path))
        self._check_tokens(files)
        for file in files:
            log_overruled(file.layout, self.dtype, name=file.name, section="data")
        path, train, val_path, val = files[0].path, files[0].layout, files[-1].path, files[-1].layout
        self._is_same = self.val_path is not None and os.path.samefile(path, val_path)
        num_held_out = round(train.num_tokens * self.val_fraction) if self.val_path is None else 0
        num_train = 0 if self._is_same else train.num_tokens - num_held_out
        windows = (
            self._windows(path, train, 0, num_train),
            self._windows(val_path, val, num_train if self.val_path is None else 0, val.num_tokens),
        )
        self._check_splits(*windows)
        self._prepared = windows

    def hold_out_all(self) -> None:
        """Use the whole file for validation; called before `prepare`, by modes that do not train."""
        self.val_path, self.val_fraction = None, 1.0

    @property
    def fingerprint(self) -> str:
        """Names and sizes of the files; their content is not hashed, because they may be hundreds of GB."""
        files = [self.path] if self.val_path is None else [self.path, self.val_path]
        sizes = [f"{Path(file).name}:{expand_home(file, 'data.path').stat().st_size}" for file in files]
        return f"{'+'.join(sizes)}/{self.dtype}/{self.val_fraction}"

    def describe(self) -> str:
        """Return the number of samples and the tokens per sample."""
        counts = f"{len(self.train()):,} training and {count(len(self.val()), 'validation sample')}"
        return f"{counts} of {count(self.seq_len, 'token')} in {self.path}"

    def train(self) -> TokenWindows:
        """Return the training samples.

        Raises:
            ConfigError: The file is also that of the validation samples, so that there are none.
        """
        assert self._prepared is not None, "prepare() comes first"
        if self._is_same:
            reason = "it is the file of data.path, so no token is left to train on"
            fix = "data.val_path=null, which holds out its end, or data.val_path=<another file>"
            raise ConfigError(f"data.val_path={self.val_path}", reason, fix)
        return self._prepared[0]

    def val(self) -> TokenWindows:
        """Return the validation samples, the same for every seed."""
        assert self._prepared is not None, "prepare() comes first"
        return self._prepared[1]

    def split_texts(self) -> NDArray[np.void]:
        """Return what is trained on of each file, as `SPLIT_TEXT`; after `prepare`."""
        assert self._prepared is not None, "prepare() comes first"
        train, val = self._prepared
        if train.path == val.path or self._is_same:
            return np.array([(file_key(train.path), train.stop, val.stop)], dtype=SPLIT_TEXT)
        rows = [(file_key(train.path), train.stop, train.stop), (file_key(val.path), 0, val.stop)]
        return np.array(rows, dtype=SPLIT_TEXT)

    def hold_out(self, keys: NDArray[np.uint64], num_train: NDArray[np.int64]) -> int:
        """Train at most on the first tokens, because others are validation data; see `TextSource.hold_out`."""
        assert self._prepared is not None, "prepare() comes first"
        train, val = self._prepared
        limits = dict(zip(keys.tolist(), num_train.tolist(), strict=True))
        limit = limits.get(file_key(train.path), train.stop)
        if limit >= train.stop:
            return 0
        held_out = copy.copy(train)
        held_out.stop = limit
        self._check_splits(held_out, val)
        self._prepared = held_out, val
        return 1

    def _check_splits(self, train: TokenWindows, val: TokenWindows) -> None:
        is_one = self.val_path is None
        check_splits(
            val if self._is_same or self.val_fraction >= 1 else train,
            val,
            val_fraction=self.val_fraction if is_one and self.val_fraction < 1 else None,
            cuts=True,
            more="data.path=<more tokens>" if is_one or not len(train) else "data.val_path=<more tokens>",
        )

    def _windows(self, path: Path, layout: TokenLayout, start: int, stop: int) -> TokenWindows:
        return TokenWindows(
            path,
            dtype=layout.dtype,
            seq_len=self.seq_len,
            start=start,
            stop=stop,
            byte_offset=layout.byte_offset,
        )

    def _open(self, name: str, value: str) -> "_OpenedFile":
        """Return a file with its layout, and what shows of the type of its integers."""
        key = f"data.{name}"
        path = expand_home(value, key).absolute()
        fix = f"{key}=<file of {self.dtype} tokens>"
        if not os.path.isfile(path):
            raise ConfigError(f"{key}={value}", describe_missing(path), fix)
        try:
            with path.open("rb") as file:
                head = file.read(NUM_HEAD_BYTES)
                layout = read_layout(head, num_bytes=path.stat().st_size, dtype=self.dtype, name=value, key=key)
                sample = b"" if layout.header is not None else sample_bytes(file, layout)
        except OSError as error:
            raise ConfigError(f"{key}={value}", f"it cannot be read: {error.strerror}", fix) from error
        return _OpenedFile(key, value, path, layout, sample, find_bits(sample, vocab_size=self.vocab_size))

    def _check_tokens(self, files: "Sequence[_OpenedFile]") -> None:
        """Check that the tokens of all files are of the type with which they are read, and within the vocabulary."""
        by_bits = {file.bits: (file.key, file.name) for file in files if file.bits is not None}
        if len(by_bits) > 1:
            raise explain_two_types(by_bits, self.dtype)
        cache_dir = open_cache_dir(self.cache_dir)
        for file in files:
            width = 8 * np.dtype(file.layout.dtype).itemsize
            bits = file.bits or width
            largest = largest_token(file.path, file.layout, cache_dir=cache_dir)
            if bits <= width and largest < self.vocab_size:
                continue
            if file.layout.header is None:
                reject_big_endian(file.sample, self.dtype, key=file.key, name=file.name, vocab_size=self.vocab_size)
            if bits == width:
                raise explain_large_token(file.key, file.name, largest, vocab_size=self.vocab_size)
            if bits < 64:
                num_tokens = 8 * file.path.stat().st_size // bits
                largest = largest_token(file.path, TokenLayout(f"uint{bits}", 0, num_tokens), cache_dir=cache_dir)
            raise explain_type(file.key, file.name, file.layout, bits, largest=largest, vocab_size=self.vocab_size)


@dataclass(frozen=True)
class _OpenedFile:
    """A file of tokens, the setting and name that were typed, a sample of its bytes, and the width of its integers."""

    key: str
    name: str
    path: Path
    layout: TokenLayout
    sample: bytes
    bits: int | None


def largest_token(path: Path, layout: TokenLayout, *, cache_dir: Path) -> int:
    """Return the largest token; the file is read in full once per (path, size, times of change)."""
    # the time of the last change of its content or status too: that of the content can be set
    status = path.stat()
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    state = f"{path.resolve()} {status.st_size} {times} {layout.dtype} {layout.byte_offset}"
    key = hashlib.blake2b(state.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    folder = cache_dir / "token_files" / key

    def build(temporary: Path) -> None:
        largest = 0
        with path.open("rb") as file:
            file.seek(layout.byte_offset)
            dtype = np.dtype(layout.dtype).newbyteorder("<")
            for first in range(0, layout.num_tokens, _CHUNK_TOKENS):
                chunk = np.fromfile(file, dtype=dtype, count=min(_CHUNK_TOKENS, layout.num_tokens - first))
                largest = max(largest, int(chunk.max(initial=0)))
        (temporary / _LARGEST).write_text(str(largest), encoding="utf-8")

    build_once(folder, build, is_complete=_has_largest)
    return int((folder / _LARGEST).read_text(encoding="utf-8"))


def _has_largest(folder: Path) -> bool:
    path = folder / _LARGEST
    return path.is_file() and path.read_bytes().isdigit()
