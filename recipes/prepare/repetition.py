"""Measure repetition in a text as Gopher does (arXiv 2112.11446, appendix A.1.1), about 0.05 s per MB.

Words are split at white space. Letters: W words, V distinct words, P places (indices of words) where an n-gram starts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TOP_LENGTHS = (2, 3, 4)  # of n-grams of which the most frequent one counts
DUPLICATE_LENGTHS = (5, 6, 7, 8, 9, 10)  # of n-grams that must not repeat


@dataclass(frozen=True)
class Words:
    """The words of a text as numbers.

    Attributes:
        distinct: [V], in the order in which they first occur.
        counts: [V], how often each occurs.
        ids: [W], index of each word in `distinct`.
        lengths: [W], in characters.
    """

    distinct: list[str]
    counts: Ints
    ids: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class NgramCharacters:
    """Characters within repeated n-grams, by n; each character counts once.

    Attributes:
        top: Of the most frequent n-gram, all places; 0 if none occurs twice.
        duplicate: Of every n-gram that occurred before, without its first place.
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
    """Return how many lines or paragraphs occurred before in the text, and the characters in them."""
    counts = Counter(parts)
    if len(counts) == len(parts):
        return 0, 0
    num_characters = sum((count - 1) * len(part) for part, count in counts.items())
    return len(parts) - len(counts), num_characters


def count_ngram_characters(words: Words) -> NgramCharacters:
    """Count the characters within repeated n-grams for all lengths in one pass, without collisions of hashes.

    An n-gram has the characters of its words and of one space between each two. Among equally frequent n-grams the one
    with the most characters is the top one. An n-gram can only repeat where the (n - 1)-gram at the same place does, so
    that the places to look at become few after n = 3 in ordinary text.
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
        places: [P], where an (n - 1)-gram starts that occurs more than once; ascending within a group.
        groups: [P], equal for equal (n - 1)-grams.
        ids: [W].
        repeats: [W], whether the word occurs more than once.
        n: Words of an n-gram.

    Returns:
        Places, group by group and ascending within each, their groups, and whether each is the first of its group.
    """
    fits = places + n <= len(ids)
    places, groups = places[fits], groups[fits]
    fits = repeats[places + n - 1]
    places, groups = places[fits], groups[fits]
    # below (W / 2) * W: no overflow below 4e9 words
    keys = groups * len(ids) + ids[places + n - 1]
    order = np.argsort(keys, kind="stable")  # stable: the first of a group is its first place in the text
    keys, places = keys[order], places[order]
    changes = np.ones(len(keys) + 1, dtype=np.bool_)  # [P + 1], before each and after the last
    np.not_equal(keys[1:], keys[:-1], out=changes[1:-1])
    is_repeated = ~(changes[:-1] & changes[1:])
    is_first = changes[:-1][is_repeated]
    return places[is_repeated], np.cumsum(is_first) - 1, is_first


def _count_top(places: Ints, groups: Ints, is_first: Bools, offsets: Ints, n: int) -> int:
    """Return the characters within all places of the most frequent n-gram, the longest if there are several."""
    counts = np.bincount(groups)
    first = places[is_first]
    num_characters = offsets[first + n] - offsets[first]
    best = np.argmax(np.where(counts == counts.max(), num_characters, -1))
    return _count_covered(places[groups == best], offsets, n)


def _count_covered(places: Ints, offsets: Ints, n: int) -> int:
    """Return the characters within the n-grams at these ascending places; overlaps count once."""
    begins = offsets[places]
    ends = offsets[places + n] - 1  # the space after the last word is outside
    # an n-gram counts up to its end, or to where the next one begins
    ends[:-1] = np.minimum(ends[:-1], begins[1:])
    return int((ends - begins).sum())
