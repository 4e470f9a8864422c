"""Near copies by numbers: planted ones are found, none below the threshold, and each has an original that stays."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from recipes.errors import ConfigError
from recipes.prepare import near_duplicates
from recipes.prepare.minhash import BandHasher, choose_bands, shingles
from recipes.prepare.near_duplicates import Copies, Copy, find_copies, jaccard
from recipes.prepare.ngrams import Hashes, split_words

VOCABULARY = np.array([word.decode() for word in split_words("\n".join(topics.values()))])
Rng = np.random.Generator


def write(rng: Rng, num_words: int) -> list[str]:
    """Return words drawn as often as the reference of Python uses them."""
    return [str(word) for word in rng.choice(VOCABULARY, size=num_words)]


def replace(rng: Rng, words: list[str], share: float) -> list[str]:
    return [write(rng, 1)[0] if rng.random() < share else word for word in words]


def insert_and_delete(rng: Rng, words: list[str], share: float) -> list[str]:
    """Change a share of the places: half get one word more, half lose theirs."""
    changed = []
    for word in words:
        draw = rng.random()
        changed += [] if draw < share / 2 else [word, *write(rng, 1)] if draw < share else [word]
    return changed


def make_keys(sets: list[Hashes], threshold: float) -> Hashes:
    hasher = BandHasher(*choose_bands(threshold))
    return np.stack([hasher.band_keys(hashes) for hashes in sets])


def search(texts: list[str], threshold: float = 0.7, max_compared: int = 100) -> Copies:
    sets = [shingles(text) for text in texts]
    return find_copies(make_keys(sets, threshold), sets.__getitem__, threshold=threshold, max_compared=max_compared)


@cache
def planted(threshold: float) -> tuple[list[Hashes], Hashes, Copies]:
    """Return 400 documents and a changed one of each after them, their keys, and what the search finds."""
    rng = np.random.default_rng(0)
    originals = [write(rng, int(rng.integers(100, 400))) for _ in range(400)]
    changed = [
        replace(rng, words, 0.05) if i % 2 else insert_and_delete(rng, words, 0.03) for i, words in enumerate(originals)
    ]
    sets = [shingles(" ".join(words)) for words in originals + changed]
    keys = make_keys(sets, threshold)
    return sets, keys, find_copies(keys, sets.__getitem__, threshold=threshold, max_compared=100)


def test_similarities_by_hand() -> None:
    a, b = np.array([1, 2, 3, 4], dtype=np.uint64), np.array([3, 4, 5], dtype=np.uint64)
    none = np.array([], dtype=np.uint64)
    assert [jaccard(a, b), jaccard(b, a), jaccard(a, a), jaccard(a, none), jaccard(none, none)] == [0.4, 0.4, 1, 0, 0]


def test_similarity_of_texts_is_the_one_of_sets_of_words() -> None:
    rng = np.random.default_rng(0)
    words = write(rng, 500)
    texts = [words, replace(rng, words, 0.1)]
    a, b = ({tuple(text[i : i + 5]) for i in range(len(text) - 4)} for text in texts)
    assert jaccard(*(shingles(" ".join(text)) for text in texts)) == len(a & b) / len(a | b)


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8])
def test_95_percent_of_planted_copies_are_found_and_each_is_over_the_threshold(threshold: float) -> None:
    sets, _, found = planted(threshold)
    similar = [i for i in range(400) if jaccard(sets[i], sets[400 + i]) >= threshold]
    assert len(similar) >= 40, "the threshold divides the planted ones"
    pairs = {(copy.document, copy.original) for copy in found.copies}
    assert sum((400 + i, i) in pairs for i in similar) >= 0.95 * len(similar)
    for document, original, similarity in found.copies:
        assert similarity == jaccard(sets[document], sets[original]) >= threshold
        assert document == original + 400, "random documents are no copies of each other"


def test_every_original_stays_and_is_earlier() -> None:
    _, _, found = planted(0.6)
    removed = {copy.document for copy in found.copies}
    assert len(removed) == len(found.copies)
    assert all(copy.original < copy.document and copy.original not in removed for copy in found.copies)
    assert [copy.document for copy in found.copies] == sorted(removed)


def compare_all(sets: list[Hashes], keys: Hashes, threshold: float, max_compared: int) -> Copies:
    """Return what the search must find, by comparing the keys of all pairs."""
    kept: list[int] = []
    copies: list[Copy] = []
    num_compared = num_not_compared = 0
    for document in range(len(sets)):
        shared = {original: int((keys[document] == keys[original]).sum()) for original in kept}
        originals = sorted((o for o in kept if shared[o]), key=lambda o: (-shared[o], o))
        similarities = [(o, jaccard(sets[document], sets[o])) for o in originals[:max_compared]]
        first = next((i for i, (_, similarity) in enumerate(similarities) if similarity >= threshold), None)
        if first is None:
            num_compared += len(similarities)
            num_not_compared += len(originals) - len(similarities)
            kept.append(document)
        else:
            num_compared += first + 1
            copies.append(Copy(document, *similarities[first]))
    return Copies(copies, num_compared, num_not_compared)


@pytest.mark.parametrize("max_compared", [1, 2, 5, 1000])
def test_the_result_is_the_one_of_comparing_all_pairs_that_share_a_band(max_compared: int) -> None:
    rng = np.random.default_rng(1)
    families = [write(rng, 200) for _ in range(12)]
    texts = [" ".join(replace(rng, families[i], 0.04)) for i in rng.integers(0, 12, size=300)]
    sets = [shingles(text) for text in texts]
    keys = make_keys(sets, 0.5)
    expected = compare_all(sets, keys, 0.5, max_compared)
    assert 50 < len(expected.copies) < 300
    assert (expected.num_not_compared > 0) == (max_compared < 1000)
    assert find_copies(keys, sets.__getitem__, threshold=0.5, max_compared=max_compared) == expected


def test_of_ten_copies_exactly_one_stays() -> None:
    rng = np.random.default_rng(2)
    words = write(rng, 400)
    found = search([" ".join(replace(rng, words, 0.01)) for _ in range(10)])
    assert [copy.document for copy in found.copies] == list(range(1, 10))
    assert {copy.original for copy in found.copies} == {0}


def test_a_chain_of_copies_is_no_family() -> None:
    # windows of 100 words in one text, each 20 words further: neighbours share 76 of 116 shingles (0.66), every other
    # one 56 of 136 (0.41); so the first, third and fifth stay, and a component would keep the first alone
    words = write(np.random.default_rng(3), 200)
    sets = [shingles(" ".join(words[start : start + 100])) for start in range(0, 100, 20)]
    found = find_copies(make_keys(sets, 0.5), sets.__getitem__, threshold=0.5, max_compared=10)
    assert found.copies == [Copy(1, 0, 76 / 116), Copy(3, 2, 76 / 116)]


def test_the_earlier_one_stays() -> None:
    rng = np.random.default_rng(4)
    words = write(rng, 300)
    texts = [" ".join(words), " ".join(write(rng, 300)), " ".join(words[:290])]
    forwards, backwards = search(texts), search(texts[::-1])
    assert [copy[:2] for copy in forwards.copies] == [copy[:2] for copy in backwards.copies] == [(2, 0)]
    assert forwards.copies[0].similarity == 286 / 296


@pytest.mark.parametrize(("threshold", "num_copies"), [(0.5, 1), (0.501, 0)])
def test_a_similarity_equal_to_the_threshold_is_enough(threshold: float, num_copies: int) -> None:
    sets = [np.array(numbers, dtype=np.uint64) for numbers in ([1, 2, 3], [2, 3, 4])]
    keys = np.ones((2, 1), dtype=np.uint64)
    found = find_copies(keys, sets.__getitem__, threshold=threshold, max_compared=1)
    assert len(found.copies) == num_copies


def test_a_shared_header_makes_no_copies() -> None:
    rng = np.random.default_rng(5)
    header = write(rng, 60)
    found = search([" ".join(header + write(rng, 60)) for _ in range(50)], threshold=0.7)  # 56 of 176: 0.32
    assert found.copies == []
    assert found.num_compared > 0, "some share a band"


def test_documents_without_words_are_no_copies() -> None:
    found = search(["", "…", "?!", "some words that are enough", ""])
    assert found == Copies([], num_compared=0, num_not_compared=0)


def test_equal_short_documents_are_copies() -> None:
    assert search(["Table of contents", "Table of Contents.", "Contents"]).copies == [Copy(1, 0, 1.0)]


def test_documents_that_are_left_out_are_neither_copies_nor_originals() -> None:
    sets = [shingles(topics["with"])] * 4
    is_candidate = np.array([False, True, False, True])
    found = find_copies(
        make_keys(sets, 0.8), sets.__getitem__, threshold=0.8, max_compared=10, is_candidate=is_candidate
    )
    assert found.copies == [Copy(3, 1, 1.0)]


def one_bucket(num_documents: int, shares: Callable[[int], bool]) -> tuple[list[Hashes], Hashes]:
    """Return sets that have nothing in common, with keys that are equal in the first of three bands where asked for."""
    sets = [np.array([i], dtype=np.uint64) for i in range(num_documents)]
    keys = 10 + np.arange(3 * num_documents, dtype=np.uint64).reshape(num_documents, 3)
    keys[[i for i in range(num_documents) if shares(i)], 0] = 1
    return sets, keys


def test_in_a_bucket_of_10000_each_is_compared_with_the_limit_and_the_rest_is_counted() -> None:
    sets, keys = one_bucket(10_000, lambda i: True)
    found = find_copies(keys, sets.__getitem__, threshold=0.8, max_compared=3)
    assert found.copies == []
    assert found.num_compared == 1 + 2 + 3 * 9997
    assert found.num_compared + found.num_not_compared == 10_000 * 9999 // 2


def test_the_original_that_shares_most_bands_is_compared_first() -> None:
    sets, keys = one_bucket(1000, lambda i: True)
    sets[999] = sets[500]
    keys[999, 2] = keys[500, 2]
    found = find_copies(keys, sets.__getitem__, threshold=0.8, max_compared=1)
    assert found.copies == [Copy(999, 500, 1.0)]
    keys[999, 2] = 5  # now all originals share one band and the earliest is compared
    assert find_copies(keys, sets.__getitem__, threshold=0.8, max_compared=1).copies == []


def test_a_bucket_lends_its_first_originals_and_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "_MAX_PER_BUCKET", 5)
    sets, keys = one_bucket(100, lambda i: True)
    found = find_copies(keys, sets.__getitem__, threshold=0.8, max_compared=50)
    assert found.num_compared == sum(min(i, 5) for i in range(100))
    assert found.num_compared + found.num_not_compared == 100 * 99 // 2
    keys[99, 2] = keys[50, 2]
    sets[99] = sets[50]
    copies = find_copies(keys, sets.__getitem__, threshold=0.8, max_compared=50).copies
    assert copies == [Copy(99, 50, 1.0)], "a band of its own finds it"


def test_only_documents_that_share_a_bucket_are_loaded(tmp_path: Path) -> None:
    sets, keys = one_bucket(5000, lambda i: i % 1000 == 7)
    mapped = np.memmap(tmp_path / "keys", dtype=np.uint64, mode="w+", shape=keys.shape)
    mapped[:] = keys
    loaded: Counter[int] = Counter()

    def load(document: int) -> Hashes:
        loaded[document] += 1
        return sets[document]

    assert find_copies(mapped, load, threshold=0.8, max_compared=10).num_compared == 10
    assert loaded == {7: 1, 1007: 1, 2007: 1, 3007: 1, 4007: 1}


def test_shingles_are_loaded_again_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [shingles(topics["with"])] * 4
    keys = make_keys(sets, 0.8)
    loads: list[int] = []

    def load(document: int) -> Hashes:
        loads.append(document)
        return sets[document]

    found = find_copies(keys, load, threshold=0.8, max_compared=10)
    assert loads == [1, 0, 2, 3]
    monkeypatch.setattr(near_duplicates, "_MAX_CACHED_BYTES", 0)
    assert find_copies(keys, load, threshold=0.8, max_compared=10) == found
    assert loads[4:] == [1, 0, 2, 0, 3, 0]


def test_nothing_has_no_copies() -> None:
    keys = np.empty((0, 3), dtype=np.uint64)
    assert find_copies(keys, lambda i: keys[i], threshold=0.8, max_compared=1) == Copies([], 0, 0)


@pytest.mark.parametrize(("threshold", "max_compared", "setting"), [(0.0, 10, "threshold=0.0"), (0.8, 0, "max_comp")])
def test_a_number_out_of_range_is_an_error(threshold: float, max_compared: int, setting: str) -> None:
    keys = np.ones((1, 1), dtype=np.uint64)
    with pytest.raises(ConfigError, match=setting):
        find_copies(keys, lambda i: keys[i], threshold=threshold, max_compared=max_compared)
