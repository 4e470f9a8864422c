"""Shingles by hand, minima against datasketch itself, bands against their probability."""

import pickle
from math import sqrt
from pydoc_data.topics import topics

import numpy as np
import pytest

from recipes.errors import ConfigError
from recipes.prepare.minhash import NO_KEY, BandHasher, candidate_rate, choose_bands, shingles
from recipes.prepare.ngrams import Hashes, hash_ngrams, hash_words, split_words

TEXT = topics["with"]


def test_shingles_are_the_sorted_distinct_ngrams() -> None:
    text = "to be or not to be or not"  # to be or | be or not | or not to | not to be | to be or | be or not
    word_hashes = hash_words(split_words(text))
    expected = {int(hash_ngrams(word_hashes[i : i + 3], (3,))[3][0]) for i in range(6)}
    assert len(expected) == 4
    assert shingles(text, 3).tolist() == sorted(expected)


def test_a_short_text_is_one_shingle_and_an_empty_one_has_none() -> None:
    assert shingles("only three words").tolist() == shingles("Only THREE words!", 3).tolist()
    assert len(shingles("only three words")) == 1
    assert shingles("").tolist() == shingles("?!…").tolist() == []


def test_case_punctuation_and_numbers_do_not_change_shingles() -> None:
    changed = "On 3 May 2024, about 17:05, the WRITER closed — at last — the file."
    assert (
        shingles(changed).tolist() == shingles("on 11 may 1999 about 5.30 the writer closed at last the file").tolist()
    )


@pytest.mark.parametrize("num_shingles", [1, 511, 512, 513, 2000])
def test_minima_are_those_of_datasketch(num_shingles: int) -> None:
    from datasketch import MinHash

    hashes = np.random.default_rng(0).integers(0, 2**64, size=num_shingles, dtype=np.uint64)
    theirs = MinHash(num_perm=14 * 8, seed=1, scheme="affine64", hashfunc=int)
    theirs.update_batch(hashes.tolist())
    assert BandHasher(14, 8).minima(hashes).tolist() == theirs.hashvalues.tolist()


def test_a_band_key_says_whether_all_rows_of_the_band_are_equal() -> None:
    hasher = BandHasher(14, 8)
    hashes = shingles(TEXT)
    others = hashes[np.random.default_rng(0).random(len(hashes)) < 0.9]
    bands = [hasher.minima(side).reshape(14, 8) for side in (hashes, others)]
    is_equal = (bands[0] == bands[1]).all(axis=1)
    assert 0 < is_equal.sum() < 14
    assert (hasher.band_keys(hashes) == hasher.band_keys(others)).tolist() == is_equal.tolist()


def test_a_document_without_shingles_has_no_key() -> None:
    assert BandHasher(3, 2).band_keys(shingles("")).tolist() == [NO_KEY] * 3


def test_a_pickled_hasher_gives_the_same_keys() -> None:
    hasher = BandHasher(5, 4)
    assert pickle.loads(pickle.dumps(hasher)).band_keys(shingles(TEXT)).tolist() == (
        hasher.band_keys(shingles(TEXT)).tolist()
    )


def pair(rng: np.random.Generator, num_shared: int, num_own: int) -> tuple[Hashes, Hashes]:
    """Return two sets whose Jaccard similarity is shared / (shared + 2 own)."""
    hashes = rng.integers(0, 2**64, size=num_shared + 2 * num_own, dtype=np.uint64)
    shared, a, b = np.split(hashes, [num_shared, num_shared + num_own])
    return np.sort(np.concatenate((shared, a))), np.sort(np.concatenate((shared, b)))


@pytest.mark.parametrize(("num_shared", "num_own"), [(50, 75), (100, 50), (120, 40), (150, 25), (180, 10)])
def test_the_rate_of_candidates_is_the_one_of_14_bands_of_8_rows(num_shared: int, num_own: int) -> None:
    rng = np.random.default_rng(num_shared)
    hasher, num_pairs = BandHasher(14, 8), 1000
    num_found = 0
    for _ in range(num_pairs):
        a, b = pair(rng, num_shared, num_own)
        num_found += bool((hasher.band_keys(a) == hasher.band_keys(b)).any())
    expected = candidate_rate(num_shared / (num_shared + 2 * num_own), 14, 8)
    # four standard deviations of a binomial share: one seed in 16,000 exceeds them; at least one pair
    bound = max(4 * sqrt(expected * (1 - expected) / num_pairs), 1 / num_pairs)
    assert abs(num_found / num_pairs - expected) <= bound


def test_the_rate_of_candidates_by_hand() -> None:
    assert candidate_rate(0.5, 2, 2) == 1 - 0.75 * 0.75
    assert [candidate_rate(similarity, 14, 8) for similarity in (0.0, 1.0)] == [0.0, 1.0]


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.99, 1.0])
def test_chosen_bands_find_98_percent_at_the_threshold_with_as_many_rows_as_possible(threshold: float) -> None:
    num_bands, num_rows = choose_bands(threshold)
    assert num_bands * num_rows <= 112
    assert candidate_rate(threshold, num_bands, num_rows) >= 0.98
    more_rows = num_rows + 1
    assert more_rows > 112 or candidate_rate(threshold, 112 // more_rows, more_rows) < 0.98


def test_bands_of_common_thresholds() -> None:
    assert [choose_bands(threshold) for threshold in (0.7, 0.8, 0.9)] == [(22, 5), (18, 6), (11, 10)]


def test_a_threshold_too_low_for_the_permutations_is_an_error_with_the_lowest_that_works() -> None:
    with pytest.raises(ConfigError, match=r"threshold=0\.04 or more"):
        choose_bands(0.03)
    assert choose_bands(0.04) == (112, 1)


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.01, float("nan")])
def test_a_threshold_outside_of_0_to_1_is_an_error(threshold: float) -> None:
    with pytest.raises(ConfigError, match="Jaccard"):
        choose_bands(threshold)


def test_no_permutations_are_an_error() -> None:
    with pytest.raises(ConfigError, match="num_permutations=0"):
        choose_bands(0.8, num_permutations=0)
