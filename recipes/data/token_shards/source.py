"""Data source of token files that may be remote and larger than the local disk.

Shapes: L tokens per sample.
"""

import hashlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from recipes.cache import open_cache_dir
from recipes.data.file_kinds import NUM_HEAD_BYTES
from recipes.data.full_windows import FullWindows
from recipes.data.order import Order, Positions, ShuffledOrder, mix64
from recipes.data.text.token_cache import SPLIT_TEXT
from recipes.data.token_layout import (
    TokenLayout,
    explain_large_token,
    explain_two_types,
    explain_type,
    find_bits,
    log_overruled,
    read_layout,
    reject_big_endian,
)
from recipes.data.token_shards.storage import Storage
from recipes.errors import ConfigError
from recipes.files import count
from recipes.tokenizer import Tokenizer

# Shuffled sample order that reads few files at a time, computed from the position: no shuffle buffer to checkpoint.
#
# Shapes: F files, N samples in all files.


class ShardOrder(Order):
    """Shuffles the files in each epoch, splits them into groups, and shuffles the samples within each group.

    Args:
        counts: [F], samples per file.
        num_open_shards: Files per group, that is, files read at once.
        seed: Seed of the run.
    """

    def __init__(self, counts: Sequence[int], *, num_open_shards: int, seed: int) -> None:
        self._counts = np.asarray(counts, dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts  # [F], first sample of each file
        self._num_samples = int(self._counts.sum())
        self._num_open_shards = num_open_shards
        self._seed = seed
        self._files = ShuffledOrder(len(counts), seed)
        # per process: the epochs that a batch may span
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    @override
    def indices(self, positions: Positions) -> Positions:
        flat = positions.reshape(-1)
        epochs, offsets = np.divmod(flat, self._num_samples)
        found = np.empty_like(flat)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[here] = self._in_epoch(epoch, offsets[here])
        return found.reshape(positions.shape)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_epoch"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[Positions, Positions]:
        """Return the file order of an epoch, [F], and the position in the epoch at which each file starts, [F]."""
        numbers = np.arange(len(self._counts), dtype=np.int64)
        files = self._files.indices(epoch * len(self._counts) + numbers)
        counts = self._counts[files]
        return files, np.cumsum(counts) - counts

    def _in_epoch(self, epoch: int, offsets: Positions) -> Positions:
        files, begins = self._epoch(epoch)
        groups = begins[:: self._num_open_shards]  # first position of each group
        numbers = np.searchsorted(groups, offsets, side="right") - 1
        found = np.empty_like(offsets)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            first = number * self._num_open_shards
            members = files[first : first + self._num_open_shards]
            counts = self._counts[members]
            order = ShuffledOrder(int(counts.sum()), self._group_seed(epoch, number))
            within = order.indices(offsets[here] - groups[number])
            ends = np.cumsum(counts)
            file = np.searchsorted(ends, within, side="right")
            found[here] = self._firsts[members[file]] + within - (ends - counts)[file]
        return found

    def _group_seed(self, epoch: int, group: int) -> int:
        key = np.array([self._seed & (2**63 - 1), epoch, group], dtype=np.uint64)
        return int(mix64(mix64(mix64(key[:1]) ^ key[1:2]) ^ key[2:])[0])


LOGGER = logging.getLogger("lightning_recipes")

_OPEN_FILES = 64  # per process
_SUFFIXES = (".npy", ".bin")  # of files in a folder


class ShardWindows(FullWindows):
    """Concatenated samples of all files; no sample spans two files.

    Sample i of a file reads its tokens [i L, i L + L) and predicts the successor of each. Picklable.

    Args:
        storage: Storage of the files.
        layouts: Location and type of the tokens of each file.
        seq_len: L.
        vocab_size: Every token must be below it.
        num_open_shards: Files among which samples are shuffled.
    """

    def __init__(
        self,
        storage: Storage,
        layouts: Sequence[TokenLayout],
        *,
        seq_len: int,
        vocab_size: int,
        num_open_shards: int,
    ) -> None:
        self._storage = storage
        self.layouts = list(layouts)
        self._vocab_size = vocab_size
        self._num_open_shards = num_open_shards
        super().__init__(seq_len)
        self.counts = [max(0, (layout.num_tokens - 1) // seq_len) for layout in layouts]
        self._lasts = np.cumsum(self.counts)  # one past the last sample of each file
        self._open = lru_cache(maxsize=_OPEN_FILES)(self._open_file)

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample: inputs and targets, [L] int64."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        file = int(np.searchsorted(self._lasts, index, side="right"))
        first = (index - int(self._lasts[file]) + self.counts[file]) * self.seq_len
        tokens = torch.from_numpy(self._open(file)[first : first + self.seq_len + 1].astype(np.int64))  # [L + 1]
        return {"inputs": tokens[:-1], "targets": tokens[1:]}

    def make_order(self, seed: int) -> ShardOrder:
        """Return the order of the stream, which reads few files at a time."""
        return ShardOrder(self.counts, num_open_shards=self._num_open_shards, seed=seed)

    def describe_sample(self, index: int) -> dict[str, Any]:
        """Return the file of a sample."""
        return {"documents": [{"name": self._storage.names[int(np.searchsorted(self._lasts, index, side="right"))]}]}

    @property
    def setting(self) -> str:
        """Config key of the path of the files."""
        return self._storage.setting

    def count_tokens(self) -> list[tuple[int, int]]:
        """Return a hash of where each file is, and its number of tokens."""
        return [*zip(self._storage.keys(), (layout.num_tokens for layout in self.layouts), strict=True)]

    def keep_first(self, limits: Mapping[int, int]) -> "ShardWindows":
        """Return the samples of the first tokens of each file, as many as `limits` gives for the hash of its place."""
        layouts = [
            replace(layout, num_tokens=min(layout.num_tokens, limits.get(key, layout.num_tokens)))
            for key, layout in zip(self._storage.keys(), self.layouts, strict=True)
        ]
        return ShardWindows(
            self._storage,
            layouts,
            seq_len=self.seq_len,
            vocab_size=self._vocab_size,
            num_open_shards=self._num_open_shards,
        )

    def _open_file(self, file: int) -> NDArray[np.unsignedinteger]:
        layout = self.layouts[file]
        tokens: NDArray[np.unsignedinteger] = np.memmap(
            self._storage.open_local(file),
            dtype=np.dtype(layout.dtype).newbyteorder("<"),
            mode="r",
            offset=layout.byte_offset,
            shape=(layout.num_tokens,),
        )
        if (largest := int(tokens.max(initial=0))) >= self._vocab_size:
            key, name = self._storage.setting, self._storage.names[file]
            raise explain_large_token(key, name, largest, vocab_size=self._vocab_size)
        return tokens

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_open"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open = lru_cache(maxsize=_OPEN_FILES)(self._open_file)


@dataclass(kw_only=True)
class TokenShards:
    """Token files in local or object storage: `.npy`, or `.bin`, raw or with the header of llm.c.

    Args:
        path: File, folder or glob, optionally with an fsspec protocol.
        val_path: The same for validation; None: the last file of `path`.
        dtype: Dtype of files without a header, little-endian.
        num_open_shards: Files read at once, among which samples are shuffled.
        cache_gb: Maximum size of cached copies of remote files; None: unlimited.
        vocab_size: Every token must be below it.
        seq_len: Tokens per sample.
        cache_dir: Folder of cached copies.
    """

    sample_kind: ClassVar[str] = "tokens"
    tokenizer: ClassVar[Tokenizer | None] = None  # not stored in the files

    path: str
    val_path: str | None
    dtype: Literal["uint16", "uint32"]
    num_open_shards: Annotated[int, ">= 1"]
    cache_gb: Annotated[float, "> 0"] | None
    vocab_size: Annotated[int, ">= 1"]
    seq_len: Annotated[int, ">= 1"]
    cache_dir: str

    def __post_init__(self) -> None:
        self._prepared: tuple[ShardWindows, ShardWindows] | None = None
        self._holds_out_all = False

    def hold_out_all(self) -> None:
        """Use all files of `path` for validation; called before `prepare`, by modes that do not train."""
        self._holds_out_all = True

    def prepare(self) -> None:
        """List the files and read their first bytes; a second call does nothing.

        Raises:
            ConfigError: There are no files or too few, or a file does not hold tokens.
        """
        if self._prepared is not None:
            return
        storage = self._open("path", self.path)
        layouts, by_bits = self._layouts(storage)
        found = {"data.path": by_bits}
        files = range(len(layouts))
        if self._holds_out_all:
            trained, val = [], (storage, layouts)
        elif self.val_path is not None:
            val_storage = self._open("val_path", self.val_path)
            val_layouts, found["data.val_path"] = self._layouts(val_storage)
            val = val_storage, val_layouts
            held_out, keys = {*val_storage.keys()}, storage.keys()
            trained = [file for file in files if keys[file] not in held_out]
            if num_held_out := len(files) - len(trained):
                are = "is a file" if num_held_out == 1 else "are files"
                LOGGER.info("%s of data.path %s of data.val_path, too, and not trained on", f"{num_held_out:,}", are)
        elif len(files) == 1:
            reason = "it is a single file, and validation reads the last one"
            whole = f", or data=token_file data.path={storage.names[0]}" if storage.is_local else ""
            raise ConfigError(f"data.path={self.path}", reason, f"data.val_path=<file of tokens>{whole}")
        else:
            trained, val = [*files[:-1]], (storage.select(files[-1:]), layouts[-1:])
        self._check_types(found)
        overruling = (pair for pair in zip(storage.names, layouts, strict=True) if pair[1].dtype != self.dtype)
        for name, layout in itertools.islice(overruling, 1):
            log_overruled(layout, self.dtype, name=name, section="data")
        train = self._windows(storage.select(trained), [layouts[file] for file in trained])
        self._prepared = train, self._windows(*val)
        self._check_splits(*self._prepared)

    def split_texts(self) -> NDArray[np.void]:
        """Return what is trained on of each file, as `SPLIT_TEXT`; after `prepare`."""
        train, val = self._ready()
        rows = [(key, num_tokens, num_tokens) for key, num_tokens in train.count_tokens()]
        rows += [(key, 0, num_tokens) for key, num_tokens in val.count_tokens()]
        return np.array(rows, dtype=SPLIT_TEXT)

    def hold_out(self, keys: NDArray[np.uint64], num_train: NDArray[np.int64]) -> int:
        """Train at most on the first tokens of some files, because others are validation data; return their number."""
        train, val = self._ready()
        held_out = train.keep_first(dict(zip(keys.tolist(), num_train.tolist(), strict=True)))
        num_held_out = sum(before != after for before, after in zip(train.layouts, held_out.layouts, strict=True))
        self._prepared = held_out, val
        self._check_splits(held_out, val)
        return num_held_out

    def _check_splits(self, train: ShardWindows, val: ShardWindows) -> None:
        splits = {name: one for name, one in (("training", train), ("validation", val)) if one.layouts}
        longest = min(max(layout.num_tokens for layout in one.layouts) for one in splits.values())
        for split, windows in splits.items():
            if not len(windows):
                shorter = f"seq_len={longest - 1} or less, or " if longest > 1 else ""
                reason = f"no {split} file has {self.seq_len + 1} tokens"
                raise ConfigError(f"seq_len={self.seq_len}", reason, f"{shorter}{windows.setting}=<larger files>")

    @property
    def fingerprint(self) -> str:
        """String that is equal for files of equal names and sizes."""
        storages = [windows._storage for windows in self._ready()]
        names = " ".join(f"{n} {s}" for storage in storages for n, s in zip(storage.names, storage.sizes, strict=True))
        digest = hashlib.blake2b(names.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
        return f"{digest}/{self.seq_len}/{self.num_open_shards}"

    def describe(self) -> str:
        """Return the number of files and samples."""
        train, val = self.train(), self.val()
        files = f"{len(train.counts):,} training and {count(len(val.counts), 'validation file')}"
        samples = f"{len(train):,} and {count(len(val), 'sample')} of {count(self.seq_len, 'token')}"
        return f"{files}; {samples} in {self.path}"

    def describe_sample(self, sample: int) -> dict[str, Any]:
        """Return the file of a training sample, for the dump of a bad batch."""
        return self.train().describe_sample(sample)

    def train(self) -> ShardWindows:
        """Return the training samples.

        Raises:
            ConfigError: All files are also those of the validation samples.
        """
        train = self._ready()[0]
        if not train.layouts and not self._holds_out_all:
            reason = "all files of data.path are in it, so none is left to train on"
            fix = "data.val_path=null, which holds out the last one, or data.val_path=<some of the files>"
            raise ConfigError(f"data.val_path={self.val_path}", reason, fix)
        return train

    def val(self) -> ShardWindows:
        """Return the validation samples."""
        return self._ready()[1]

    def _ready(self) -> tuple[ShardWindows, ShardWindows]:
        assert self._prepared is not None, "prepare() comes first"
        return self._prepared

    def _open(self, name: str, path: str) -> Storage:
        cache_dir = open_cache_dir(self.cache_dir)
        return Storage(
            path,
            setting=f"data.{name}",
            suffixes=_SUFFIXES,
            content="tokens",
            cache_dir=cache_dir,
            cache_gb=self.cache_gb,
        )

    def _windows(self, storage: Storage, layouts: list[TokenLayout]) -> ShardWindows:
        return ShardWindows(
            storage,
            layouts,
            seq_len=self.seq_len,
            vocab_size=self.vocab_size,
            num_open_shards=self.num_open_shards,
        )

    def _layouts(self, storage: Storage) -> tuple[list[TokenLayout], dict[int, tuple[str, bytes]]]:
        """Return the location and type of the tokens in each file.

        Also returns, by width of its integers, the name and the first bytes of a file that does not record its type.
        """
        layouts, by_bits = list[TokenLayout](), dict[int, tuple[str, bytes]]()
        for index, (file, head) in enumerate(zip(storage.names, storage.read_heads(NUM_HEAD_BYTES), strict=True)):
            size = storage.sizes[index]
            layout = read_layout(head, num_bytes=size, dtype=self.dtype, name=file, key=storage.setting)
            layouts.append(layout)
            bits = None if layout.header else find_bits(head, vocab_size=self.vocab_size)
            if not layout.header:
                reject_big_endian(head, self.dtype, key=storage.setting, name=file, vocab_size=self.vocab_size)
            if bits is not None:
                by_bits.setdefault(bits, (file, head))
        return layouts, by_bits

    def _check_types(self, found: Mapping[str, Mapping[int, tuple[str, bytes]]]) -> None:
        """Check that files without a header are of the type with which they are read.

        Args:
            found: Setting -> width of the integers -> name and first bytes of a file.
        """
        names = {bits: (key, file) for key, by_bits in found.items() for bits, (file, _) in by_bits.items()}
        if len(names) > 1:
            raise explain_two_types(names, self.dtype)
        dtype = np.dtype(self.dtype).newbyteorder("<")
        for key, by_bits in found.items():
            for bits, (file, head) in by_bits.items():
                num_tokens = len(head) // dtype.itemsize
                is_read = int(np.frombuffer(head, dtype, num_tokens).max(initial=0)) < self.vocab_size
                if bits == 8 * dtype.itemsize or (bits < 8 * dtype.itemsize and is_read):
                    continue
                found_dtype = np.dtype(f"<u{bits // 8}")
                largest = int(np.frombuffer(head, found_dtype, len(head) // found_dtype.itemsize).max(initial=0))
                layout = TokenLayout(self.dtype, 0, num_tokens)
                raise explain_type(key, file, layout, bits, largest=largest, vocab_size=self.vocab_size)
