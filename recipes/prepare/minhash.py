"""Compute shingles and MinHash band keys of documents; documents that share a key may be near duplicates.

Shapes: W words of a document, S shingles, B bands, R rows per band.
"""

import math

import numpy as np

from recipes.errors import ConfigError, type_extra
from recipes.prepare.ngrams import MULTIPLIER, Hashes, hash_ngrams, hash_words, split_words

NO_KEY = np.uint64(0)  # key of a document without shingles in every band; never matches another document

_MIN_RECALL = 0.98
_SHINGLES_AT_A_TIME = 512  # 0.4 MB with 112 permutations, which fits into the L2 cache


def shingles(text: str, num_words: int = 5) -> Hashes:
    """Return the sorted unique hashes of the word n-grams of a text, [S].

    A shorter text is one shingle of all its words; a text without words has none.

    Args:
        text: A whole document; case and punctuation are ignored, numbers are masked.
        num_words: Words per shingle.
    """
    word_hashes = hash_words(split_words(text))  # [W]
    if word_hashes.size == 0:
        return word_hashes
    length = min(num_words, len(word_hashes))
    hashes = np.sort(hash_ngrams(word_hashes, (length,))[length])
    is_first = np.ones(len(hashes), dtype=np.bool_)
    is_first[1:] = hashes[1:] != hashes[:-1]
    return hashes[is_first]


def candidate_rate(similarity: float, num_bands: int, num_rows: int) -> float:
    """Return the probability that two documents with this Jaccard similarity share a band."""
    return float(1.0 - (1.0 - similarity**num_rows) ** num_bands)


def choose_bands(threshold: float, *, num_permutations: int = 112) -> tuple[int, int]:
    """Return the numbers of bands and rows that miss at most 2 % of the pairs at the threshold similarity.

    More rows per band mean fewer candidates to verify, so this is the largest number that meets the limit. The usual
    choice, which weighs misses against false candidates, misses about half of the pairs at the threshold.

    Raises:
        ConfigError: The threshold is not in (0, 1], or too low for the number of permutations.
    """
    check_threshold(threshold)
    if num_permutations < 1:
        reason = "there is nothing to cut into bands"
        raise ConfigError(f"num_permutations={num_permutations}", reason, "num_permutations=112, or more")
    for num_rows in range(num_permutations, 0, -1):
        num_bands = num_permutations // num_rows
        if candidate_rate(threshold, num_bands, num_rows) >= _MIN_RECALL:
            return num_bands, num_rows
    lowest = 1.0 - (1.0 - _MIN_RECALL) ** (1.0 / num_permutations)
    raise ConfigError(
        f"threshold={threshold}",
        f"{num_permutations} permutations miss more than 2 % of such pairs, however they are cut into bands",
        f"threshold={math.ceil(lowest * 100) / 100:.2f} or more, or more permutations",
    )


def check_threshold(threshold: float) -> None:
    """Check a similarity threshold.

    Raises:
        ConfigError: It is not in (0, 1].
    """
    if not 0.0 < threshold <= 1.0:
        reason = "a Jaccard similarity of copies is above 0 and at most 1"
        raise ConfigError(f"threshold={threshold}", reason, "threshold=0.8, or another number in (0, 1]")


class BandHasher:
    """Computes MinHash band keys of documents, about 50 MB of text per second with 112 permutations.

    The permutations are those of datasketch ("affine64") for a fixed seed. Unpickling does not import datasketch, which
    would take 0.8 s.

    Args:
        num_bands: Number of bands, B.
        num_rows: Rows per band, R.
        seed: Seed of the permutations; keys of different seeds are not comparable.

    Raises:
        ConfigError: datasketch is not installed.
    """

    def __init__(self, num_bands: int, num_rows: int, *, seed: int = 1) -> None:
        try:
            from datasketch import MinHash
        except ImportError as error:
            reason = "datasketch (needed for near copies) is not installed"
            fix = f"{type_extra('prepare')}, or mode.near_copies=null"
            raise ConfigError("mode.near_copies", reason, fix) from error
        self.num_bands = num_bands
        self.num_rows = num_rows
        minhash = MinHash(num_perm=num_bands * num_rows, seed=seed, scheme="affine64")
        self._multipliers: Hashes = minhash.permutations[0]  # [B * R]
        self._increments: Hashes = minhash.permutations[1]  # [B * R]

    def minima(self, hashes: Hashes) -> Hashes:
        """Return the minimum over the shingles per permutation, [B * R]; the largest integer if there are none."""
        mixed = _mix64(hashes)
        minima = np.full(self.num_bands * self.num_rows, np.iinfo(np.uint64).max, dtype=np.uint64)
        for start in range(0, len(mixed), _SHINGLES_AT_A_TIME):
            values = mixed[start : start + _SHINGLES_AT_A_TIME, None] * self._multipliers  # [<= 512, B * R]
            values += self._increments
            np.minimum(minima, values.min(axis=0), out=minima)
        return minima

    def band_keys(self, hashes: Hashes) -> Hashes:
        """Return a key per band, [B]; documents with an equal key in any band are candidates.

        Args:
            hashes: [S], as returned by `shingles`; if empty, all keys are `NO_KEY`.
        """
        if hashes.size == 0:
            return np.full(self.num_bands, NO_KEY)
        bands = self.minima(hashes).reshape(self.num_bands, self.num_rows)
        keys = bands[:, 0]
        for row in range(1, self.num_rows):
            keys = keys * MULTIPLIER + bands[:, row]  # [B]
        return np.where(keys == NO_KEY, np.uint64(1), keys)


def _mix64(values: Hashes) -> Hashes:
    """Spread every bit over 64 bits (finalizer of MurmurHash3, which datasketch applies before it permutes)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
