"""Repetition by numbers: worked out by hand, and against the definition written out word by word."""

import numpy as np
import pytest

from recipes.prepare.repetition import (
    DUPLICATE_LENGTHS,
    TOP_LENGTHS,
    count_ngram_characters,
    count_repeats,
    number_words,
)


def top(text: str, n: int) -> int:
    return count_ngram_characters(number_words(text)).top[n]


def duplicate(text: str, n: int) -> int:
    return count_ngram_characters(number_words(text)).duplicate[n]


def test_words_are_split_at_any_white_space_and_equal_ones_share_a_number() -> None:
    words = number_words(" the cat,\tthe\n\ndog the ")
    assert words.distinct == ["the", "cat,", "dog"]
    assert words.ids.tolist() == [0, 1, 0, 2, 0]
    assert words.counts.tolist() == [3, 1, 1]
    assert words.lengths.tolist() == [3, 4, 3, 3, 3]


def test_the_first_of_equal_lines_is_no_repeat() -> None:
    assert count_repeats(["ab", "cde", "ab", "ab", "cde"]) == (3, 2 + 2 + 3)
    assert count_repeats(["ab", "cde"]) == (0, 0)
    assert count_repeats([]) == (0, 0)


def test_the_top_bigram_has_the_characters_of_all_its_places() -> None:
    assert top("a b c a b d a b", 2) == 3 * len("a b")
    assert top("a b c a b d a b", 3) == 0, "no three words occur twice"


def test_the_more_frequent_ngram_is_the_top_one_even_if_a_longer_one_has_more_characters() -> None:
    assert top("a b 1 a b 2 a b 3 wonderful world 4 wonderful world", 2) == 3 * len("a b")


def test_the_longest_of_equally_frequent_ngrams_is_the_top_one() -> None:
    assert top("c d 1 aa bb 2 c d 3 aa bb", 2) == 2 * len("aa bb")


def test_words_in_overlapping_places_count_once() -> None:
    assert top("x x x x", 2) == len("x x x x")
    assert top("a b a b a", 3) == len("a b a b a")  # `a b a` at 0 and 2 share one word
    passage = "one two six ten fox cat"
    assert duplicate(f"{passage} end {passage}", 5) == len(passage), "two places in the second passage, 4 words shared"


def test_a_repeated_passage_counts_without_its_first_place() -> None:
    passage = "one two six ten fox"
    assert duplicate(f"{passage} end {passage}", 5) == 19
    assert duplicate(f"{passage} end {passage} stop {passage}", 5) == 38
    assert duplicate(f"{passage} end {passage}", 6) == 0


def test_the_space_between_two_neighboring_ngrams_belongs_to_neither() -> None:
    assert duplicate("a b c d e a b c d e a b c d e z", 10) == len("a b c d e a b c d e")
    assert top("a b c a b a b", 2) == 9, "`a b` three times, the space between the last two is not counted"


def test_ngrams_do_not_reach_beyond_the_end() -> None:
    assert duplicate("a b c d e a b c d", 5) == 0
    assert duplicate("a b c d e a b c d e", 5) == len("a b c d e")


@pytest.mark.parametrize("text", ["", " \n ", "word", "word word", "one two"])
def test_texts_of_few_words_have_no_duplicate_ngrams(text: str) -> None:
    counted = count_ngram_characters(number_words(text))
    assert counted.duplicate == dict.fromkeys(range(5, 11), 0)
    assert counted.top == dict.fromkeys((2, 3, 4), 0)


def covered(words: list[str], places: list[int], n: int) -> int:
    """Return the characters in these n-grams by marking each character, and each space, of a text."""
    marks = [[False] * (len(word) + 1) for word in words]
    for place in places:
        for i in range(place, place + n):
            marks[i] = [True] * len(words[i]) + [marks[i][-1] or i < place + n - 1]
    return sum(map(sum, marks))


@pytest.mark.parametrize("num_distinct", [1, 2, 3, 6, 20])
@pytest.mark.parametrize("num_words", [9, 10, 11, 300])
def test_all_lengths_agree_with_the_definition(num_distinct: int, num_words: int) -> None:
    rng = np.random.default_rng(num_distinct)
    vocabulary = ["".join(rng.choice(list("abc"), size=rng.integers(1, 9))) + str(i) for i in range(num_distinct)]
    words = [str(word) for word in rng.choice(vocabulary, size=num_words)]
    if num_words == 300:
        words += words[50:90] + words[60:100]
    counted = count_ngram_characters(number_words(" ".join(words)))
    for n in (*TOP_LENGTHS, *DUPLICATE_LENGTHS):
        places: dict[tuple[str, ...], list[int]] = {}
        for i in range(len(words) - n + 1):
            places.setdefault(tuple(words[i : i + n]), []).append(i)
        if n in DUPLICATE_LENGTHS:
            repeats = sorted(place for group in places.values() for place in group[1:])
            assert counted.duplicate[n] == covered(words, repeats, n)
        else:
            most, length = max((len(group), len(" ".join(ngram))) for ngram, group in places.items())
            tied = [v for ngram, v in places.items() if (len(v), len(" ".join(ngram))) == (most, length)]
            expected = {covered(words, group, n) for group in tied} if most > 1 else {0}
            assert counted.top[n] in expected
