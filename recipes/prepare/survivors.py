"""Documents of all chunks that passed the first pass: find duplicates and read lines.

Shapes: N documents, B bands.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.files import reserve
from recipes.prepare.chunk import chunk_path
from recipes.prepare.minhash import shingles
from recipes.prepare.near_duplicates import Bools, Copies, find_copies
from recipes.prepare.ngrams import Hashes

_KEYS = "keys.bin"


class Survivors:
    """All surviving documents of a folder of chunks, in order.

    Args:
        folder: Folder of the chunks.
        num_chunks: Number of chunks, all complete.
        text_field: Name of the field that holds the text.
    """

    def __init__(self, folder: Path, num_chunks: int, *, text_field: str) -> None:
        self._folder = folder
        self._text_field = text_field
        parts = [self._load(number) for number in range(num_chunks)]
        counts = [len(part["line_bytes"]) for part in parts]
        self._firsts = np.cumsum([0, *counts])  # [chunks + 1]
        self.line_bytes = np.concatenate([part["line_bytes"] for part in parts])  # [N]
        self.text_bytes = np.concatenate([part["text_bytes"] for part in parts])  # [N]
        self.digests = np.concatenate([part["digests"] for part in parts])  # [N, 2]
        self.domains: NDArray[np.str_] = np.concatenate([part["domains"] for part in parts])  # [N]
        starts = np.cumsum(self.line_bytes) - self.line_bytes
        self._offsets = starts - np.repeat(starts[self._firsts[:-1][np.array(counts) > 0]], [n for n in counts if n])

    def __len__(self) -> int:
        return len(self.line_bytes)

    def count_equal(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the index of the first document and the size of each group of equal documents."""
        as_one = np.ascontiguousarray(self.digests).view([("a", "<u8"), ("b", "<u8")]).reshape(-1)
        _, firsts, counts = np.unique(as_one, return_index=True, return_counts=True)
        return firsts, counts

    def find_first(self) -> Bools:
        """Return whether each document is the first of its equals, [N]."""
        is_first = np.zeros(len(self), dtype=np.bool_)
        is_first[self.count_equal()[0]] = True
        return is_first

    def find_near_copies(self, is_candidate: Bools, *, threshold: float, max_compared: int) -> Copies:
        """Find the near copies among the candidates, see `find_copies`."""
        return find_copies(
            self._band_keys(),
            lambda document: shingles(self.text(document)),
            threshold=threshold,
            max_compared=max_compared,
            is_candidate=is_candidate,
        )

    def text(self, document: int) -> str:
        """Return the text of a document."""
        [line] = self.lines(np.array([document]))
        return str(json.loads(line)[self._text_field])

    def lines(self, documents: NDArray[np.int64]) -> Iterator[bytes]:
        """Yield the lines of the given documents, which must be in ascending order."""
        chunks = np.searchsorted(self._firsts, documents, side="right") - 1
        for chunk in np.unique(chunks).tolist():
            with chunk_path(self._folder, chunk, ".jsonl").open("rb") as file:
                for document in documents[chunks == chunk].tolist():
                    file.seek(int(self._offsets[document]))
                    yield file.read(int(self.line_bytes[document]))

    def _load(self, number: int) -> dict[str, NDArray[Any]]:
        with np.load(chunk_path(self._folder, number, ".npz")) as arrays:
            return {name: arrays[name] for name in arrays.files if name != "keys"}

    def _band_keys(self) -> Hashes:
        """Return the band keys of all documents, [N, B], as a memory map."""
        path = self._folder / _KEYS
        keys: Hashes | None = None
        for number, (start, stop) in enumerate(zip(self._firsts, self._firsts[1:], strict=False)):
            with np.load(chunk_path(self._folder, number, ".npz")) as arrays:
                part = arrays["keys"]
            if keys is None:
                shape = (len(self), part.shape[1])
                reserve(path, shape[0] * shape[1] * np.dtype(np.uint64).itemsize)
                keys = np.memmap(path, mode="r+", dtype=np.uint64, shape=shape)
            keys[start:stop] = part
        assert keys is not None, "there is a chunk"
        return keys


def cut_shards(line_bytes: Sequence[int], max_bytes: int) -> list[tuple[int, int]]:
    """Return start and end of each output file: at most `max_bytes`, unless a single document is larger."""
    shards: list[tuple[int, int]] = []
    start = size = 0
    for index, num_bytes in enumerate(line_bytes):
        if index > start and size + num_bytes > max_bytes:
            shards.append((start, index))
            start, size = index, 0
        size += num_bytes
    return [*shards, (start, len(line_bytes))] if len(line_bytes) else []
