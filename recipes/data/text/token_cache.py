"""Token cache on disk, written once per (content, tokenizer, split); reopening it only costs hashing the corpus.

`<cache_dir>/tokens/<key>/` holds `train.bin` and `val.bin`, raw little-endian ids: every document after the tokens that
its tokenizer puts before a text, if any, and before the end-of-text token; `documents.jsonl`, one line per document and
split in which it has tokens; `texts.npy`, the split of each document as numbers; and `meta.json`.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import multiprocessing
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from recipes.cache import build_once
from recipes.data.parallel import group_by_bytes, map_in_order
from recipes.data.text.token_corpus import TextPiece, TokenCorpus
from recipes.files import count, format_bytes
from recipes.runtime.world import num_cores
from recipes.tokenizer import Tokenizer

LOGGER = logging.getLogger("lightning_recipes")
Split = Literal["train", "val"]

# a document: hash of its text, tokens that are trained on, the first ones, and all tokens
SPLIT_TEXT = np.dtype([("key", "<u8"), ("num_train", "<i8"), ("num_tokens", "<i8")])
Row = tuple[str, Split, int, int]  # document, split, offset of its first token in the split, number of tokens

FORMAT_VERSION = 2  # increase when the same key produces different files
_CHUNK_TOKENS = 1024 * 1024
_MAX_BYTES_TO_HASH = 64 * 1024**2  # at every start: less takes negligible time


@dataclass(frozen=True)
class TokenCacheMeta:
    """The content of `meta.json`.

    Attributes:
        unigram_entropy_nats: Validation loss of a unigram model fitted to the training tokens with add-one smoothing.
            A network with a higher loss has learned nothing about context. None without validation tokens.
        val_hash: Hash of the validation tokens.
        train_hash: Hash of the training tokens.
        held_out: Hash of what `hold_out` moved to the validation split; empty if nothing.
    """

    format_version: int
    content_hash: str
    tokenizer_fingerprint: str
    val_fraction: float
    dtype: str
    vocab_size: int
    end_of_text: int
    num_documents: int
    num_bytes: int
    num_train_tokens: int
    num_val_tokens: int
    unigram_entropy_nats: float | None
    val_hash: str
    train_hash: str
    held_out: str = ""


class TokenCache:
    """A complete folder of tokens.

    Args:
        folder: Written by `cached_tokens`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = TokenCacheMeta(**json.loads((folder / "meta.json").read_text("utf-8")))

    def path(self, split: Split) -> Path:
        """Return the file of a split."""
        return self.folder / f"{split}.bin"

    def num_tokens(self, split: Split) -> int:
        """Return the number of tokens of a split."""
        return self.meta.num_train_tokens if split == "train" else self.meta.num_val_tokens

    @property
    def texts(self) -> NDArray[np.void]:
        """The split of each document, in order, as `SPLIT_TEXT`."""
        texts: NDArray[np.void] = np.load(self.folder / "texts.npy", mmap_mode="r")
        return texts

    def documents(self, split: Split, *, start: int, stop: int) -> list[dict[str, Any]]:
        """Find the documents that tokens [start, stop) of a split come from; reads the index once.

        Returns:
            Dicts of `name`, `first_token` (within the document) and `num_tokens`.
        """
        found = []
        with (self.folder / "documents.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                first = max(start, row["offset"])
                last = min(stop, row["offset"] + row["num_tokens"])
                if row["split"] == split and first < last:
                    place = {"first_token": first - row["offset"], "num_tokens": last - first}
                    found.append({"name": row["name"]} | place)
        return found


def cached_tokens(
    corpus: TokenCorpus, tokenizer: Tokenizer, *, val_fraction: float, num_processes: int | None
) -> TokenCache:
    """Return the tokens of a corpus, tokenizing it if they are not cached; safe in any number of processes.

    Args:
        corpus: Documents to read.
        tokenizer: Tokenizer that encodes them.
        val_fraction: Fraction of the text for validation.
        num_processes: Processes that tokenize; None: one per core.

    Raises:
        ConfigError: The text cannot be read; nothing is left in the cache.
    """
    recipe = f"{FORMAT_VERSION} {corpus.content_hash} {tokenizer.fingerprint} {val_fraction!r}"
    recipe += describe_start(tokenizer)
    key = hashlib.blake2b(recipe.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    folder = corpus.cache_dir / "tokens" / key
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"

    def build(temporary: Path) -> None:
        pieces = tokenize(corpus, tokenizer, dtype=dtype, num_processes=num_processes)
        start, end = (np.array(ids, dtype=dtype) for ids in (tokenizer.first_tokens, [tokenizer.end_of_text]))
        num_documents, num_train, num_val = _write_tokens(
            temporary,
            pieces,
            start=start,
            end=end,
            is_held_out=corpus.make_split(val_fraction),
            val_fraction=val_fraction,
        )
        corpus.check_unchanged()
        meta = TokenCacheMeta(
            format_version=FORMAT_VERSION,
            content_hash=corpus.content_hash,
            tokenizer_fingerprint=tokenizer.fingerprint,
            val_fraction=val_fraction,
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            num_documents=num_documents,
            num_bytes=corpus.num_bytes,
            num_train_tokens=num_train,
            num_val_tokens=num_val,
            unigram_entropy_nats=_unigram_entropy(temporary, dtype=dtype, vocab_size=tokenizer.vocab_size),
            val_hash=_hash_file(temporary / "val.bin"),
            train_hash=_hash_file(temporary / "train.bin"),
        )
        _write_meta(temporary, meta)

    build_once(folder, build, is_complete=is_complete)
    return TokenCache(folder)


def hold_out(cache: TokenCache, num_train: NDArray[np.int64]) -> TokenCache:
    """Return the same tokens with another split; safe in any number of processes.

    Args:
        cache: Tokens in their own split.
        num_train: Tokens of each document to train on, the first ones, [number of documents].
    """
    digest = hashlib.blake2b(num_train.astype("<i8").tobytes(), digest_size=12).hexdigest()
    key = hashlib.blake2b(f"{cache.folder.name} {digest}".encode(), digest_size=12).hexdigest()
    folder = cache.folder.with_name(key)
    meta, texts = cache.meta, np.array(cache.texts)

    def build(temporary: Path) -> None:
        num_tokens = meta.num_train_tokens + meta.num_val_tokens
        LOGGER.info(
            "Copying the cached %s (%s): texts of them are in another split here",
            *(count(num_tokens, "token"), format_bytes(num_tokens * np.dtype(meta.dtype).itemsize)),
        )
        splits: tuple[Split, Split] = ("train", "val")
        tokens = {split: _map_tokens(cache.path(split), meta.dtype) for split in splits}
        read, written, rows = {"train": 0, "val": 0}, {"train": 0, "val": 0}, list[Row]()
        with (temporary / "train.bin").open("wb") as train, (temporary / "val.bin").open("wb") as val:
            for name, text, wanted in zip(_read_names(cache.folder), texts, num_train.tolist(), strict=True):
                own = {"train": int(text["num_train"]), "val": int(text["num_tokens"]) - int(text["num_train"])}
                document = np.concatenate([tokens[split][read[split] : read[split] + own[split]] for split in splits])
                read = {split: read[split] + own[split] for split in splits}
                for split, file, part in zip(splits, (train, val), (document[:wanted], document[wanted:]), strict=True):
                    if len(part):
                        file.write(part.tobytes())
                        rows.append((name, split, written[split], len(part)))
                        written[split] += len(part)
        _write_index(temporary / "documents.jsonl", rows)
        texts["num_train"] = num_train
        np.save(temporary / "texts.npy", texts)
        changed = replace(
            meta,
            num_train_tokens=written["train"],
            num_val_tokens=written["val"],
            unigram_entropy_nats=_unigram_entropy(temporary, dtype=meta.dtype, vocab_size=meta.vocab_size),
            val_hash=_hash_file(temporary / "val.bin"),
            train_hash=_hash_file(temporary / "train.bin"),
            held_out=digest,
        )
        _write_meta(temporary, changed)

    build_once(folder, build, is_complete=is_complete)
    return TokenCache(folder)


def describe_start(tokenizer: Tokenizer) -> str:
    """Return what is before every document, as a part of the key of cached tokens; empty if nothing is."""
    first = "".join(map(tokenizer.spell, tokenizer.first_tokens))
    return f"/documents start with {first}" if first else ""


def is_complete(folder: Path) -> bool:
    """Return whether a folder has its files, with the sizes and, up to 64 MiB, the content given by `meta.json`.

    The tokens of larger files are checked as they are read: they must be in the vocabulary.
    """
    if not all((folder / name).is_file() for name in ("meta.json", "documents.jsonl", "texts.npy")):
        return False
    try:
        cache = TokenCache(folder)
        texts = np.load(folder / "texts.npy", mmap_mode="r")
        with (folder / "documents.jsonl").open(encoding="utf-8") as lines:
            json.loads(lines.readline())
    except (TypeError, ValueError, EOFError):  # not JSON, or has other fields, or no array
        return False
    if texts.dtype != SPLIT_TEXT or len(texts) != cache.meta.num_documents:
        return False
    hashes: dict[Split, str] = {"train": cache.meta.train_hash, "val": cache.meta.val_hash}
    item_bytes = np.dtype(cache.meta.dtype).itemsize
    return all(
        _is_whole(cache.path(split), cache.num_tokens(split) * item_bytes, content) for split, content in hashes.items()
    )


def _is_whole(path: Path, num_bytes: int, content: str) -> bool:
    if not path.is_file() or path.stat().st_size != num_bytes:
        return False
    return not content or num_bytes > _MAX_BYTES_TO_HASH or _hash_file(path) == content


@dataclass
class _SplitWriter:
    """Appends documents to the file of one split and tracks their offsets."""

    split: Split
    file: BinaryIO
    num_tokens: int = 0
    document_start: int = 0

    def write(self, tokens: NDArray[np.unsignedinteger]) -> None:
        self.file.write(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes())
        self.num_tokens += len(tokens)

    def end_document(self, name: str) -> tuple[str, Split, int, int]:
        row = (name, self.split, self.document_start, self.num_tokens - self.document_start)
        self.document_start = self.num_tokens
        return row


def _write_tokens(
    folder: Path,
    pieces: Iterable[tuple[TextPiece, NDArray[np.unsignedinteger]]],
    *,
    start: NDArray[np.unsignedinteger],
    end: NDArray[np.unsignedinteger],
    is_held_out: Callable[[TextPiece], bool],
    val_fraction: float,
) -> tuple[int, int, int]:
    """Write `train.bin`, `val.bin` and `documents.jsonl`; return the numbers of documents and of tokens per split."""
    rows, keys = list[Row](), array("Q")
    train_path, val_path = folder / "train.bin", folder / "val.bin"
    with train_path.open("wb") as train_file, val_path.open("wb") as val_file:
        train, val = _SplitWriter("train", train_file), _SplitWriter("val", val_file)
        for piece, tokens in pieces:
            writer = val if is_held_out(piece) else train
            if writer.num_tokens == writer.document_start:
                writer.write(start)
            writer.write(tokens)
            if piece.ends_document:
                writer.write(end)
                rows.append(writer.end_document(piece.name))
                keys.append(piece.text_key())
    num_documents, num_train, num_val = len(rows), train.num_tokens, val.num_tokens
    if num_val == 0:
        num_val = round(num_train * val_fraction)
        num_train -= num_val
        _move_tail(folder, num_bytes=num_train * end.itemsize)
        rows = list(_split_rows(rows, num_train=num_train))
    _write_index(folder / "documents.jsonl", rows)
    _write_texts(folder / "texts.npy", keys, rows)
    return num_documents, num_train, num_val


def _split_rows(rows: list[Row], *, num_train: int) -> Iterator[Row]:
    """Yield the rows of one stream, split at the first validation token."""
    for name, _, offset, num_tokens in rows:
        before = min(num_tokens, max(0, num_train - offset))
        if before > 0:
            yield name, "train", offset, before
        if before < num_tokens:
            yield name, "val", max(0, offset - num_train), num_tokens - before


def _write_index(path: Path, rows: list[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for name, split, offset, num_tokens in rows:
            row = {"name": name, "split": split, "offset": offset, "num_tokens": num_tokens}
            file.write(json.dumps(row) + "\n")


def _write_texts(path: Path, keys: Sequence[int], rows: Sequence[Row]) -> None:
    """Write the split of each document; a document that is cut has two rows, the training part first."""
    texts = np.zeros(len(keys), dtype=SPLIT_TEXT)
    texts["key"] = keys
    number, previous = -1, ""
    for name, split, _, num_tokens in rows:
        number += not (split == "val" and name == previous)
        previous = name if split == "train" else ""
        texts["num_tokens"][number] += num_tokens
        texts["num_train"][number] += num_tokens if split == "train" else 0
    assert number == len(keys) - 1, (number, len(keys))
    np.save(path, texts)


def _read_names(folder: Path) -> Iterator[str]:
    """Yield the name of each document, in order."""
    previous = ""
    with (folder / "documents.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if not (row["split"] == "val" and row["name"] == previous):
                yield row["name"]
            previous = row["name"] if row["split"] == "train" else ""


def _write_meta(folder: Path, meta: TokenCacheMeta) -> None:
    (folder / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n", "utf-8")


def _map_tokens(path: Path, dtype: str) -> NDArray[np.unsignedinteger]:
    little_endian = np.dtype(dtype).newbyteorder("<")
    return np.memmap(path, little_endian, mode="r") if path.stat().st_size else np.zeros(0, little_endian)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=12)).hexdigest()


def _move_tail(folder: Path, *, num_bytes: int) -> None:
    """Move everything after the first bytes of `train.bin` to `val.bin`."""
    with (folder / "train.bin").open("r+b") as train, (folder / "val.bin").open("wb") as val:
        train.seek(num_bytes)
        while chunk := train.read(_CHUNK_TOKENS):
            val.write(chunk)
        train.truncate(num_bytes)


def _counts(path: Path, *, dtype: str, vocab_size: int) -> NDArray[np.int64]:
    """Return the number of occurrences of each id in a file, [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    with path.open("rb") as file:
        while len(chunk := np.fromfile(file, dtype=dtype, count=_CHUNK_TOKENS)):
            counts += np.bincount(chunk, minlength=vocab_size)
    return counts


def _unigram_entropy(folder: Path, *, dtype: str, vocab_size: int) -> float | None:
    train = _counts(folder / "train.bin", dtype=dtype, vocab_size=vocab_size)
    val = _counts(folder / "val.bin", dtype=dtype, vocab_size=vocab_size)
    if val.sum() == 0:
        return None
    log_frequency = np.log(train + 1) - math.log(int(train.sum()) + vocab_size)
    return float(-(val * log_frequency).sum() / val.sum())


# Tokenize text in parallel processes, in order and in bounded memory: ~3 MB/s per core with BPE.
#
# Workers import only numpy and `tokenizers`.

log = logging.getLogger(__name__)

Tokens = NDArray[np.unsignedinteger]

# with less text per process, starting it (~0.3 s) does not pay off
_MIN_BYTES_PER_PROCESS = 2 * 1024**2
_MIN_BYTES_PER_PROCESS_OF_BYTES = 256 * 1024**2  # bytes are copied, not searched
_TASK_BYTES = 1024 * 1024


def tokenize(
    corpus: TokenCorpus, tokenizer: Tokenizer, *, dtype: str, num_processes: int | None = None
) -> Iterator[tuple[TextPiece, Tokens]]:
    """Yield every piece of the corpus and its tokens, in the order of the corpus.

    Args:
        corpus: Documents to read.
        tokenizer: Tokenizer that encodes them. Documents stay uncut if cutting would change their ids.
        dtype: Dtype of the arrays, "uint16" or "uint32".
        num_processes: Maximum number of processes, fewer if the text is short; None: one per core.

    Yields:
        Pieces, each with its tokens, [number of tokens].

    Raises:
        ConfigError: Text is not UTF-8; always raised in the calling process.
    """
    tasks = group_by_bytes(corpus.pieces(cut=tokenizer.splits_at_lines), max_bytes=_TASK_BYTES)
    workers = num_workers(corpus.num_bytes, tokenizer, num_processes=num_processes)
    encode = functools.partial(_encode, tokenizer=tokenizer, dtype=dtype)
    with _progress(corpus.num_bytes) as advance:
        for task, arrays in map_in_order(encode, tasks, workers=workers):
            yield from zip(task, arrays, strict=True)
            advance(sum(piece.num_bytes for piece in task))


def num_workers(num_bytes: int, tokenizer: Tokenizer, *, num_processes: int | None) -> int:
    """Return the number of worker processes worth starting; 1 means the current process."""
    if multiprocessing.current_process().daemon:
        return 1  # a daemonic process may not have children
    per_process = _MIN_BYTES_PER_PROCESS_OF_BYTES if tokenizer.is_bytes else _MIN_BYTES_PER_PROCESS
    most = num_cores() if num_processes is None else num_processes
    return max(1, min(most, num_bytes // per_process))


def _encode(task: list[TextPiece], *, tokenizer: Tokenizer, dtype: str) -> list[Tokens]:
    return [tokenizer.encode_array(piece.read()).astype(dtype) for piece in task]


@contextlib.contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar on a terminal, or log one line; yield a function that advances it by bytes."""
    if sys.stderr is None or not sys.stderr.isatty():  # None: closed by the shell
        log.info("tokenizing %s of text", format_bytes(num_bytes))
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("tokenizing", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("tokenizing", total=num_bytes)
        yield lambda advance: bar.advance(row, advance)
