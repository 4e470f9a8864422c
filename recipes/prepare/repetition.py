"""Measure repetition in a text as Gopher does (arXiv 2112.11446, appendix A.1.1), about 0.05 s per MB.

Words are split at white space. Letters: W words, V distinct words, P places (word indices) where an n-gram starts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TOP_LENGTHS = (2, 3, 4)  # n-gram lengths for which the most frequent one counts
DUPLICATE_LENGTHS = (5, 6, 7, 8, 9, 10)  # n-gram lengths that must not repeat


@dataclass(frozen=True)
class Words:
    """Words of a text, encoded as integers.

    Attributes:
        distinct: [V], in order of first occurrence.
        counts: [V], occurrences of each.
        ids: [W], index of each word in `distinct`.
        lengths: [W], characters per word.
    """

    distinct: list[str]
    counts: Ints
    ids: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class NgramCharacters:
    """Characters within repeated n-grams, by n; overlaps count once.

    Attributes:
        top: Characters in all occurrences of the most frequent n-gram; 0 if none repeats.
        duplicate: Characters in all occurrences of repeated n-grams except the first.
    """

    top: dict[int, int]
    duplicate: dict[int, int]


def number_words(text: str) -> Words:
    """Split a text at white space and number its words."""
    words = text.split()
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    ids = np.fromiter(map(numbers.__getitem__, words), dtype=np.int64, count=len(words))  # [W]
    lengths = np.fromiter(map(len, numbers), dtype=np.int64, count=len(numbers))  # [V]
    counts = np.bincount(ids, minlength=len(numbers)).astype(np.int64, copy=False)  # [V]
    return Words(list(numbers), counts, ids, lengths[ids])


def count_repeats(parts: Sequence[str]) -> tuple[int, int]:
    """Return the number of lines or paragraphs that repeat an earlier one, and their characters."""
    counts = Counter(parts)
    if len(counts) == len(parts):
        return 0, 0
    num_characters = sum((count - 1) * len(part) for part, count in counts.items())
    return len(parts) - len(counts), num_characters


def count_ngram_characters(words: Words) -> NgramCharacters:
    """Count the characters within repeated n-grams for all lengths in one pass, without hash collisions.

    An n-gram consists of its words with single spaces between them. Among equally frequent n-grams the one with the
    most characters is the top one. An n-gram can only repeat where its leading (n - 1)-gram does, so in ordinary text
    few places remain after n = 3.
    """
    top = dict.fromkeys(TOP_LENGTHS, 0)
    duplicate = dict.fromkeys(DUPLICATE_LENGTHS, 0)
    offsets = np.zeros(len(words) + 1, dtype=np.int64)  # [W + 1], where each word starts, in characters
    np.cumsum(words.lengths + 1, out=offsets[1:])
    repeats = words.counts[words.ids] > 1  # [W]
    places = np.flatnonzero(repeats)  # [P]
    groups = words.ids[places]  # [P], equal for equal n-grams
    for n in range(2, DUPLICATE_LENGTHS[-1] + 1):
        places, groups, is_first = _extend(places, groups, words.ids, repeats, n)
        if not len(places):
            break
        if n in top:
            top[n] = _count_top(places, groups, is_first, offsets, n)
        if n in duplicate:
            duplicate[n] = _count_covered(np.sort(places[~is_first]), offsets, n)
    return NgramCharacters(top, duplicate)


def _extend(places: Ints, groups: Ints, ids: Ints, repeats: Bools, n: int) -> tuple[Ints, Ints, Bools]:
    """Return the places of the n-grams that occur more than once, given those of the (n - 1)-grams.

    Args:
        places: [P], start of each (n - 1)-gram that occurs more than once; ascending within a group.
        groups: [P], equal for equal (n - 1)-grams.
        ids: [W], word ids.
        repeats: [W], whether the word occurs more than once.
        n: Words per n-gram.

    Returns:
        Places, grouped and ascending within each group, their groups, and whether each is the first of its group.
    """
    fits = places + n <= len(ids)
    places, groups = places[fits], groups[fits]
    fits = repeats[places + n - 1]
    places, groups = places[fits], groups[fits]
    # less than (W / 2) * W: no overflow for fewer than 4e9 words
    keys = groups * len(ids) + ids[places + n - 1]
    order = np.argsort(keys, kind="stable")  # stable: the first of a group is its first place in the text
    keys, places = keys[order], places[order]
    changes = np.ones(len(keys) + 1, dtype=np.bool_)  # [P + 1], group boundaries
    np.not_equal(keys[1:], keys[:-1], out=changes[1:-1])
    is_repeated = ~(changes[:-1] & changes[1:])
    is_first = changes[:-1][is_repeated]
    return places[is_repeated], np.cumsum(is_first) - 1, is_first


def _count_top(places: Ints, groups: Ints, is_first: Bools, offsets: Ints, n: int) -> int:
    """Return the characters in all occurrences of the most frequent n-gram, the longest on a tie."""
    counts = np.bincount(groups)
    first = places[is_first]
    num_characters = offsets[first + n] - offsets[first]
    best = np.argmax(np.where(counts == counts.max(), num_characters, -1))
    return _count_covered(places[groups == best], offsets, n)


def _count_covered(places: Ints, offsets: Ints, n: int) -> int:
    """Return the characters within the n-grams at ascending places; overlaps count once."""
    begins = offsets[places]
    ends = offsets[places + n] - 1  # excludes the space after the last word
    # an n-gram counts up to its end or the start of the next one
    ends[:-1] = np.minimum(ends[:-1], begins[1:])
    return int((ends - begins).sum())
