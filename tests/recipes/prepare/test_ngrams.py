"""Words and hashes of n-grams by hand: what separates words, what is dropped, what is equal."""

from itertools import pairwise

import numpy as np
import pytest
import xxhash

from recipes.prepare.ngrams import MULTIPLIER, hash_ngrams, hash_words, split_words


def words(text: str, *, mask_digits: bool = True) -> list[str]:
    return [word.decode() for word in split_words(text, mask_digits=mask_digits)]


def test_words_are_runs_of_letters_and_digits_in_lower_case() -> None:
    assert words("The QUICK (brown) fox's self.tail_end — “Ωmega”!") == (
        ["the", "quick", "brown", "fox", "s", "self", "tail", "end", "ωmega"]
    )


def test_each_number_is_one_zero_unless_digits_are_kept() -> None:
    assert words("9 of 12,345 in v2.10 ٣٤") == ["0", "of", "0", "0", "in", "v0", "0", "0"]
    assert words("9 of 12,345 in v2.10", mask_digits=False) == ["9", "of", "12", "345", "in", "v2", "10"]


def test_composed_and_decomposed_letters_are_equal() -> None:
    assert words("caf\u00e9 e\u0301t\u00c9") == words("cafe\u0301 \u00c9t\u00e9") == ["café", "été"]


def test_marks_belong_to_their_word_and_soft_hyphens_to_none() -> None:
    assert words("हिन्दी soft\u00adhyphen") == ["हिन्दी", "softhyphen"]


def test_letters_of_scripts_without_blanks_are_words() -> None:
    assert words("日本語のテスト abc한국어") == [*"日本語のテスト", "abc한국어"]


def test_lone_surrogates_and_control_characters_separate_words() -> None:
    assert words("a\ud800b\x00c\x1fd\x85e\u2028f") == list("abcdef")


def test_text_without_words_has_none() -> None:
    assert words("") == words(" \n—…!? 🙂") == []


def test_a_character_beyond_ascii_changes_no_other_word() -> None:
    ascii_text = "".join(chr(code) for code in range(128)) * 3 + " Def f(x1): return x1_y"
    assert words(ascii_text + " é") == [*words(ascii_text), "é"]


def test_word_hashes_are_those_of_xxh3() -> None:
    assert hash_words([b"the", b"cat"]).tolist() == [xxhash.xxh3_64_intdigest(word) for word in (b"the", b"cat")]


def test_hashes_of_all_lengths_are_the_polynomial_of_the_words() -> None:
    values = [3, 2**63 + 5, 7, 11]
    found = hash_ngrams(np.array(values, dtype=np.uint64), (1, 2, 3, 5))
    base = int(MULTIPLIER)
    assert found[1].tolist() == values
    assert found[2].tolist() == [(a * base + b) % 2**64 for a, b in pairwise(values)]
    assert found[3].tolist() == [
        (3 * base**2 + (2**63 + 5) * base + 7) % 2**64,
        ((2**63 + 5) * base**2 + 7 * base + 11) % 2**64,
    ]
    assert found[5].tolist() == []


@pytest.mark.parametrize("num_words", [0, 1])
def test_a_text_shorter_than_the_ngram_has_none(num_words: int) -> None:
    assert hash_ngrams(np.ones(num_words, dtype=np.uint64), (2, 13))[13].tolist() == []


def test_ten_thousand_different_ngrams_have_different_hashes() -> None:
    word_hashes = hash_words([str(i).encode() for i in range(100)])
    hashes = [hash_ngrams(word_hashes[[i, j]], (2,))[2][0] for i in range(100) for j in range(100)]
    assert len(set(hashes)) == 10_000
