"""Near duplicates: candidates that share a MinHash band, each verified by its exact Jaccard similarity.

A shared band alone is no proof: of the candidates that 14 bands of 8 rows find in Python's standard library, fewer than
half are copies. Nor is similarity transitive: connected components of candidate pairs merge unrelated sources. Here
every removed document names an original that is kept and was compared with it.

Shapes: N documents, B bands.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.errors import ConfigError
from recipes.prepare.minhash import NO_KEY, check_threshold
from recipes.prepare.ngrams import Hashes

Bools = NDArray[np.bool_]
Documents = NDArray[np.int32]

_MAX_PER_BUCKET = 16_384  # originals visited per bucket; a bucket of a million documents would take hours
_MAX_CACHED_BYTES = 256 * 1024**2


class Copy(NamedTuple):
    """Document to remove, the earlier original that is kept, and their exact Jaccard similarity."""

    document: int
    original: int
    similarity: float


@dataclass(frozen=True)
class Copies:
    """All near copies, in document order.

    Attributes:
        copies: One per document to remove; no original is itself a copy.
        num_compared: Pairs whose similarity was computed.
        num_not_compared: Pairs that shared a band but were not compared because of `max_compared`. In buckets with more
            than 16,384 originals, a pair counts once per shared bucket.
    """

    copies: list[Copy]
    num_compared: int
    num_not_compared: int


def jaccard(a: Hashes, b: Hashes) -> float:
    """Return the Jaccard similarity of two sets of shingles; 0 if both are empty.

    Args:
        a: Sorted and unique, as returned by `shingles`.
        b: Likewise, for the other document.
    """
    both = np.concatenate((a, b))
    both.sort()
    num_shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return num_shared / (len(both) - num_shared) if len(both) else 0.0


def find_copies(
    keys: Hashes,
    load_shingles: Callable[[int], Hashes],
    *,
    threshold: float,
    max_compared: int,
    is_candidate: Bools | None = None,
) -> Copies:
    """Find the documents that are near copies of an earlier, kept document.

    A document is a copy if its Jaccard similarity with an earlier document that is not itself a copy is at least the
    threshold. Originals are compared by number of shared bands, ties by position, until one is similar enough. The
    result depends only on the order of the documents. Memory in addition to the keys: at most 8 bytes per key, 256 MiB
    of shingles and the result.

    Args:
        keys: [N, B], `band_keys` of each document; may be a memory map.
        load_shingles: Returns the shingles of a document; called again if they are no longer cached.
        threshold: Minimum similarity of a copy, in (0, 1].
        max_compared: Maximum number of originals compared per document; the others are counted.
        is_candidate: [N], False for documents to skip, such as exact copies; None: all are candidates.

    Raises:
        ConfigError: A setting is out of its range.
    """
    check_threshold(threshold)
    if max_compared < 1:
        reason = "without a comparison no copy can be found"
        raise ConfigError(f"max_compared={max_compared}", reason, "max_compared=100, or any number above 0")
    buckets = _Buckets(keys, is_candidate)
    load = _Cache(load_shingles)
    copies: list[Copy] = []
    num_compared = num_not_compared = 0
    for document in buckets.documents():
        originals, num_skipped = buckets.originals(document)
        for original in originals[:max_compared].tolist():
            num_compared += 1
            similarity = jaccard(load(document), load(original))
            if similarity >= threshold:
                copies.append(Copy(document, original, similarity))
                break
        else:
            num_not_compared += max(0, len(originals) - max_compared) + num_skipped
            buckets.keep(document)
    return Copies(copies, num_compared, num_not_compared)


class _Buckets:
    """Documents grouped by equal keys per band, with the originals kept so far; single documents have no bucket."""

    def __init__(self, keys: Hashes, is_candidate: Bools | None) -> None:
        self._bucket_of = np.full(keys.shape, -1, dtype=np.int32)  # [N, B]
        sizes: list[NDArray[np.int64]] = []
        num_buckets = 0
        for band in range(keys.shape[1]):
            column = np.array(keys[:, band])  # [N]
            taking_part = column != NO_KEY if is_candidate is None else (column != NO_KEY) & is_candidate
            documents = np.flatnonzero(taking_part)
            documents = documents[np.argsort(column[documents])]
            group = np.zeros(len(documents), dtype=np.int64)
            group[1:] = np.cumsum(column[documents[1:]] != column[documents[:-1]])
            size = np.bincount(group)
            is_shared = size > 1
            bucket = num_buckets + np.cumsum(is_shared) - 1  # valid where a group is shared
            shared = is_shared[group]
            self._bucket_of[documents[shared], band] = bucket[group[shared]]
            sizes.append(size[is_shared])
            num_buckets += int(is_shared.sum())
        sizes_kept = np.minimum(np.concatenate(sizes), _MAX_PER_BUCKET)
        self._starts = np.concatenate(([0], np.cumsum(sizes_kept)))  # [buckets + 1]
        self._kept = np.empty(self._starts[-1], dtype=np.int32)  # originals, bucket by bucket
        self._num_kept = np.zeros(num_buckets, dtype=np.int64)

    def documents(self) -> list[int]:
        """Return all documents that share a bucket, in order."""
        found: list[int] = np.flatnonzero((self._bucket_of >= 0).any(axis=1)).tolist()
        return found

    def originals(self, document: int) -> tuple[Documents, int]:
        """Return the originals that share a bucket, most shared buckets first, and how many full buckets left out."""
        found = []
        num_left_out = 0
        for bucket in self._buckets(document):
            start, num_kept = self._starts[bucket], self._num_kept[bucket]
            found.append(self._kept[start : start + min(num_kept, _MAX_PER_BUCKET)])
            num_left_out += max(0, int(num_kept) - _MAX_PER_BUCKET)
        originals, num_shared = np.unique(np.concatenate(found), return_counts=True)
        return originals[np.argsort(-num_shared, kind="stable")], num_left_out

    def keep(self, document: int) -> None:
        """Keep a document as an original for later ones."""
        for bucket in self._buckets(document):
            if self._num_kept[bucket] < _MAX_PER_BUCKET:
                self._kept[self._starts[bucket] + self._num_kept[bucket]] = document
            self._num_kept[bucket] += 1

    def _buckets(self, document: int) -> list[int]:
        row = self._bucket_of[document]
        found: list[int] = row[row >= 0].tolist()
        return found


class _Cache:
    """LRU cache of shingles, up to 256 MiB."""

    def __init__(self, load: Callable[[int], Hashes]) -> None:
        self._load = load
        self._cached: OrderedDict[int, Hashes] = OrderedDict()
        self._num_bytes = 0

    def __call__(self, document: int) -> Hashes:
        if document in self._cached:
            self._cached.move_to_end(document)
            return self._cached[document]
        hashes = self._load(document)
        self._cached[document] = hashes
        self._num_bytes += hashes.nbytes
        while self._num_bytes > _MAX_CACHED_BYTES and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._num_bytes -= oldest.nbytes
        return hashes
