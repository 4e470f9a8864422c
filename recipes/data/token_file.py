"""Memory-mapped token file, raw uint16 or uint32, or .npy; read in full once to check it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np

from recipes.cache import build_once, open_cache_dir
from recipes.data.text.sequences import TokenWindows, check_length
from recipes.data.text.source import check_windows
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer

_CHUNK_TOKENS = 4 * 1024 * 1024
_PERIOD = 4  # 16-bit tokens per number of the widest type that a file may have been written with
_LARGEST = "largest_tokens"
_NPY_MAGIC = b"\x93NUMPY"
_DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class _Layout:
    """Location and type of the tokens in a file."""

    path: Path
    dtype: str
    byte_offset: int
    num_tokens: int


@dataclass(kw_only=True)
class TokenFile:
    """Training reads `path` from its start; validation reads its tail, or all of `val_path`.

    Args:
        path: File of tokens; `~` stands for the home folder.
        dtype: Dtype of a raw file, little-endian; a .npy file records its own.
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

    def prepare(self) -> None:
        """Check the files; their tokens are read only if a file is new or has changed.

        Raises:
            ConfigError: A file is missing, empty, truncated, too short, of the wrong type, or has tokens beyond the
                vocabulary.
        """
        if self._prepared is not None:
            return
        train = self._check("path", self.path)
        if self.val_path is None:
            cut = train.num_tokens - round(train.num_tokens * self.val_fraction)
            windows = self._windows(train, 0, cut), self._windows(train, cut, train.num_tokens)
        else:
            val = self._check("val_path", self.val_path)
            windows = (
                self._windows(train, 0, train.num_tokens),
                self._windows(val, 0, val.num_tokens),
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
        sizes = [f"{Path(file).name}:{Path(file).expanduser().stat().st_size}" for file in files]
        return f"{'+'.join(sizes)}/{self.dtype}/{self.val_fraction}"

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

    def _windows(self, layout: _Layout, start: int, stop: int) -> TokenWindows:
        return TokenWindows(
            layout.path,
            dtype=layout.dtype,
            seq_len=self.seq_len,
            start=start,
            stop=stop,
            byte_offset=layout.byte_offset,
        )

    def _check(self, key: str, value: str) -> _Layout:
        """Return the layout of a file whose tokens are all within the model's vocabulary."""
        layout = _layout(key, value, dtype=self.dtype)
        by_position = largest_tokens(layout, cache_dir=open_cache_dir(self.cache_dir))
        largest = max(by_position)
        if layout.path.suffix != ".npy" and (bits := find_wider_type(layout, by_position, vocab_size=self.vocab_size)):
            raise ConfigError(
                f"data.{key}={value} data.dtype={layout.dtype}",
                f"every second token is 0 or the upper half of one: the file holds {bits}-bit integers",
                "data.dtype=uint32"
                if bits == 32
                else f"data.{key}=<the same tokens written as uint32> data.dtype=uint32",
            )
        if largest >= self.vocab_size:
            raise ConfigError(
                f"data.{key}={value}",
                f"token id {largest} is outside the vocabulary (maximum {self.vocab_size - 1})",
                f"model.vocab_size={largest + 1} or more, or the right data.dtype",
            )
        return layout


def _layout(key: str, value: str, *, dtype: str) -> _Layout:
    path = Path(value).expanduser().absolute()
    fix = f"data.{key}=<file of {dtype} tokens>"
    if not path.is_file():
        raise ConfigError(f"data.{key}={value}", "there is no such file", fix)
    num_bytes, byte_offset = path.stat().st_size, 0
    try:
        with path.open("rb") as file:
            is_npy = file.read(len(_NPY_MAGIC)) == _NPY_MAGIC
    except OSError as error:
        raise ConfigError(f"data.{key}={value}", f"it cannot be read: {error.strerror}", fix) from error
    if is_npy and path.suffix != ".npy":
        raise ConfigError(f"data.{key}={value}", "it is a .npy file", f"mv {path} {path}.npy; data.{key}={value}.npy")
    if path.suffix == ".npy" and num_bytes > 0:
        dtype, byte_offset, num_bytes = _npy_layout(key, path)
    item_bytes = np.dtype(dtype).itemsize
    if num_bytes == 0:
        raise ConfigError(f"data.{key}={value}", "the file is empty", fix)
    if num_bytes % item_bytes != 0:
        raise ConfigError(
            f"data.{key}={value}",
            f"{num_bytes} bytes are not a multiple of {item_bytes}, the size of a {dtype} token: it is truncated",
            f"{fix}, copied again, or the right data.dtype",
        )
    return _Layout(path, dtype, byte_offset, num_bytes // item_bytes)


def _npy_layout(key: str, path: Path) -> tuple[str, int, int]:
    """Return the dtype, offset in bytes and size in bytes of the tokens in a .npy file."""
    fix = f"data.{key}=<one-dimensional .npy of uint16 or uint32>"
    try:
        array = np.load(path, mmap_mode="r")
        if not isinstance(array, np.ndarray):  # an .npz archive under another name
            raise ValueError("an archive of several arrays")
    except (ValueError, EOFError, OSError) as error:
        raise ConfigError(f"data.{key}={path}", f"it is not a valid .npy file ({error})", fix) from error
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.str[1:] not in ("u2", "u4"):
        raise ConfigError(f"data.{key}={path}", f"it holds {array.dtype} {array.shape}", fix)
    if array.dtype.byteorder == ">":
        raise ConfigError(f"data.{key}={path}", "its bytes are big-endian", fix)
    return array.dtype.name, array.offset, array.nbytes


def largest_tokens(layout: _Layout, *, cache_dir: Path) -> list[int]:
    """Return the largest token at each position modulo four.

    The file is read in full once per (path, size, modification time).
    """
    status = layout.path.stat()
    state = f"{layout.path.resolve()} {status.st_size} {status.st_mtime_ns} {layout.dtype}"
    key = hashlib.blake2b(state.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    folder = cache_dir / "token_files" / key

    def build(temporary: Path) -> None:
        largest = [0] * _PERIOD
        with layout.path.open("rb") as file:
            file.seek(layout.byte_offset)
            dtype = np.dtype(layout.dtype).newbyteorder("<")
            while len(chunk := np.fromfile(file, dtype=dtype, count=_CHUNK_TOKENS)):
                parts = (chunk[position::_PERIOD] for position in range(_PERIOD))
                largest = [max(before, int(part.max(initial=0))) for before, part in zip(largest, parts, strict=True)]
        (temporary / _LARGEST).write_text(" ".join(map(str, largest)), encoding="utf-8")

    build_once(folder, build, is_complete=_has_largest)
    return [int(text) for text in (folder / _LARGEST).read_text(encoding="utf-8").split()]


def find_wider_type(layout: _Layout, largest: list[int], *, vocab_size: int) -> int | None:
    """Return the bit width of the numbers in a raw file that was read with too narrow a type; None if it fits.

    A raw file does not record its type. But uint32 tokens read as uint16 are 1017, 0, 5, 0, …: every second one is the
    upper half of a token, at most that of the largest token in the vocabulary. With int64, three of four are 0.

    Args:
        layout: Layout with which the file is read.
        largest: Largest token by position, see `largest_tokens`.
        vocab_size: Every token must be below it.
    """
    bits = 8 * np.dtype(layout.dtype).itemsize
    highest_upper_half = (vocab_size - 1) >> bits
    if largest[0] <= highest_upper_half or layout.num_tokens % 2 or layout.num_tokens < _PERIOD:
        return None
    if max(largest[1], largest[3]) > highest_upper_half:
        return None
    is_cut_in_four = largest[2] == 0 and layout.num_tokens % _PERIOD == 0 and bits == 16
    return 64 if is_cut_in_four or bits == 32 else 32


def _has_largest(folder: Path) -> bool:
    path = folder / _LARGEST
    numbers = path.read_bytes().split() if path.is_file() else []
    return len(numbers) == _PERIOD and all(number.isdigit() for number in numbers)
