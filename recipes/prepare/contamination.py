"""Find documents contaminated with evaluation items by exact n-gram matches, and report the matches.

A hit names the item, the fraction of it found in the document and the longest shared passage. There is no Bloom filter:
words are compared wherever a hash matches, so that a hit is never a hash collision.

Shapes: W words of a document, G distinct n-grams of the set, P occurrences of n-grams in its items.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.errors import ConfigError
from recipes.prepare.ngrams import Hashes, hash_ngrams, hash_words, split_words

Numbers = NDArray[np.int32]

MAX_EVIDENCE_CHARACTERS = 200
_NEVER_BOILERPLATE = 10  # items: an n-gram in no more items than this is never boilerplate, however small the set
_CHUNK = re.compile(r"\S+")


class Hit(NamedTuple):
    """Item that shares n-grams with a document.

    Attributes:
        item: Id of the item.
        coverage: Words of the item within shared n-grams, as a fraction of its words that are not boilerplate.
        evidence: Longest shared passage as written in the item, up to 200 characters.
    """

    item: str
    coverage: float
    evidence: str


@dataclass(frozen=True)
class _Table:
    """Occurrences in the items of each n-gram of one length."""

    length: int
    hashes: Hashes  # [G], sorted
    starts: Numbers  # [G + 1], offsets into `items` and `positions`
    items: Numbers  # [P]
    positions: Numbers  # [P], first word


class EvaluationSet:
    """Evaluation items to search for in documents.

    Pickled size: about 25 bytes per word of the items. `find` reads about 20 MB of text per second, or 10 MB if the
    items have a million words.

    Args:
        items: Id and text of each item.
        min_coverage: Coverage of an item that makes a document contaminated, in (0, 1].
        num_words: n. A shorter item is a single n-gram.
        min_words: Items with fewer words are not searched for: they also occur in clean documents.
        max_item_share: N-grams in more than this fraction of the items, and in more than 10 items, are boilerplate,
            such as instructions: they are not searched for, and words only in them do not count for the coverage.
        mask_digits: Treat all numbers as equal, as for near duplicates.

    Attributes:
        num_items: Number of items.
        num_too_short: Items with fewer than `min_words` words.
        num_boilerplate_items: Items that are entirely boilerplate.
        num_boilerplate_ngrams: Distinct n-grams that are boilerplate.

    Raises:
        ConfigError: A setting is out of its range, or two items have the same id.
    """

    def __init__(
        self,
        items: Iterable[tuple[str, str]],
        *,
        min_coverage: float,
        num_words: int = 13,
        min_words: int = 8,
        max_item_share: float = 0.01,
        mask_digits: bool = True,
    ) -> None:
        _check(min_coverage, num_words, min_words, max_item_share)
        self.min_coverage = min_coverage
        self.num_words = num_words
        self.num_items = self.num_too_short = self.num_boilerplate_ngrams = 0
        self._mask_digits = mask_digits
        self._ids: list[str] = []
        self._texts: list[str] = []
        ngrams: dict[int, list[tuple[int, Hashes]]] = defaultdict(list)  # length -> [(item, hash at each position)]
        for item_id, text in items:
            self.num_items += 1
            word_hashes = hash_words(split_words(text, mask_digits=mask_digits))
            if len(word_hashes) < min_words:
                self.num_too_short += 1
                continue
            length = min(num_words, len(word_hashes))
            ngrams[length].append((len(self._ids), hash_ngrams(word_hashes, (length,))[length]))
            self._ids.append(item_id)
            self._texts.append(text)
        _check_ids(self._ids)
        max_items = max(_NEVER_BOILERPLATE, int(max_item_share * self.num_items))
        self._tables: list[_Table] = []
        self._num_words = np.zeros(len(self._ids), dtype=np.int32)  # per item, without boilerplate
        for length, found in sorted(ngrams.items()):
            table, num_ignored = _build_table(length, found, max_items=max_items)
            self.num_boilerplate_ngrams += num_ignored
            if len(table.hashes):
                self._tables.append(table)
                self._num_words += _covered_words(table, num_items=len(self._ids))
        self.num_boilerplate_items = int(np.count_nonzero(self._num_words == 0))

    def find(self, text: str) -> list[Hit]:
        """Return a hit for each item that shares an n-gram with a document, by decreasing coverage, then by id."""
        if not self._tables:
            return []
        words = split_words(text, mask_digits=self._mask_digits)
        hashes = hash_ngrams(hash_words(words), [table.length for table in self._tables])
        hits: list[Hit] = []
        for table in self._tables:
            slots = np.searchsorted(table.hashes, hashes[table.length])  # [W - n + 1]
            slots = np.minimum(slots, len(table.hashes) - 1)
            places = np.flatnonzero(table.hashes[slots] == hashes[table.length])
            if places.size:
                found, first = np.unique(slots[places], return_index=True)
                hits += self._hits(table, words, found.tolist(), places[first].tolist())
        return sorted(hits, key=lambda hit: (-hit.coverage, hit.item))

    def is_contaminated(self, hits: Sequence[Hit]) -> bool:
        """Return whether a hit covers at least `min_coverage` of its item."""
        return any(hit.coverage >= self.min_coverage for hit in hits)

    def _hits(self, table: _Table, words: list[bytes], slots: list[int], places: list[int]) -> list[Hit]:
        """Return the hits for n-grams, given their slots in the table and their positions in the document."""
        item_words: dict[int, list[bytes]] = {}
        shared: dict[int, list[int]] = defaultdict(list)  # item -> first words of shared n-grams
        for slot, place in zip(slots, places, strict=True):
            ngram = words[place : place + table.length]
            for i in range(table.starts[slot], table.starts[slot + 1]):
                item, position = int(table.items[i]), int(table.positions[i])
                if item not in item_words:
                    item_words[item] = split_words(self._texts[item], mask_digits=self._mask_digits)
                if item_words[item][position : position + table.length] == ngram:
                    shared[item].append(position)
        hits = []
        for item, unsorted in shared.items():
            positions = np.sort(unsorted)
            num_covered = int(np.minimum(np.diff(positions), table.length).sum()) + table.length
            start, stop = _longest_run(positions)
            evidence = _passage(self._texts[item], start, stop + table.length - 1)
            hits.append(Hit(self._ids[item], num_covered / int(self._num_words[item]), evidence))
        return hits


def _build_table(length: int, found: list[tuple[int, Hashes]], *, max_items: int) -> tuple[_Table, int]:
    """Return the table of the n-grams that occur in at most `max_items` items, and the number of other n-grams."""
    hashes = np.concatenate([ngrams for _, ngrams in found])
    items = np.concatenate([np.full(len(ngrams), item, dtype=np.int32) for item, ngrams in found])
    positions = np.concatenate([np.arange(len(ngrams), dtype=np.int32) for _, ngrams in found])
    order = np.argsort(hashes, kind="stable")  # within an n-gram, ordered by item
    hashes, items, positions = hashes[order], items[order], positions[order]
    is_first = np.ones(len(hashes), dtype=np.bool_)
    is_first[1:] = hashes[1:] != hashes[:-1]
    slot = np.cumsum(is_first) - 1  # [P]
    is_new_item = is_first.copy()
    is_new_item[1:] |= items[1:] != items[:-1]
    is_kept = np.bincount(slot[is_new_item]) <= max_items  # [G]
    places = is_kept[slot]
    sizes = np.bincount(slot)[is_kept]
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    table = _Table(length, hashes[is_first][is_kept], starts, items[places], positions[places])
    return table, int(np.count_nonzero(~is_kept))


def _covered_words(table: _Table, *, num_items: int) -> Numbers:
    """Return the number of words of each item that are within n-grams of the table, [num_items]."""
    order = np.lexsort((table.positions, table.items))
    items, positions = table.items[order], table.positions[order]
    num_new = np.full(len(items), table.length)  # new words per n-gram, before the next one of the same item
    num_new[:-1] = np.where(items[1:] == items[:-1], np.minimum(np.diff(positions), table.length), table.length)
    return np.bincount(items, weights=num_new, minlength=num_items).astype(np.int32)


def _longest_run(positions: NDArray[np.int64]) -> tuple[int, int]:
    """Return start and stop of the longest run of consecutive integers, the first on a tie."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    runs = np.split(positions, breaks)
    longest = max(runs, key=len)
    return int(longest[0]), int(longest[-1]) + 1


def _passage(text: str, start: int, stop: int) -> str:
    """Return words [start, stop) of a text as written, with adjacent punctuation; at most 200 characters."""
    num_words = 0
    begin: int | None = None
    for chunk in _CHUNK.finditer(text):  # white space always separates words, so each word lies in one chunk
        num_words += len(split_words(chunk[0]))
        if begin is None and num_words > start:
            begin = chunk.start()
        if num_words >= stop:
            return text[begin : chunk.end()][:MAX_EVIDENCE_CHARACTERS]
    raise AssertionError(f"words {start} to {stop} of a text that has {num_words}")


def _check_ids(ids: list[str]) -> None:
    seen: set[str] = set()
    for item_id in ids:
        if item_id in seen:
            raise ConfigError(f"item {item_id}", "two items have this id, so a hit would not say which", "distinct ids")
        seen.add(item_id)


def _check(min_coverage: float, num_words: int, min_words: int, max_item_share: float) -> None:
    for name, share in (("min_coverage", min_coverage), ("max_item_share", max_item_share)):
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"{name}={share}", "it is a fraction, above 0 and at most 1", f"{name}=0.5, for example")
    if not 1 <= min_words <= num_words:
        raise ConfigError(
            f"min_words={min_words}",
            f"an item has at least 1 word, and one of num_words={num_words} words or more is always searched for",
            f"min_words={min(8, max(1, num_words))}",
        )
