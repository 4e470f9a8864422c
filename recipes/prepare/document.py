"""Text measures used by the quality rules.

Words are split at white space, so adjacent punctuation belongs to a word. Blank lines and paragraphs do not count;
surrounding white space is stripped.
"""

import re
from collections.abc import Callable
from functools import cached_property

import numpy as np

from recipes.prepare.repetition import NgramCharacters, Words, count_ngram_characters, count_repeats, number_words

STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
SHORT_LINE_CHARACTERS = 30

_BULLETS = ("•", "-")
_ELLIPSES = ("...", "…")
_TERMINAL_PUNCTUATION = (".", "?", "!", '"', "'", "\u201d", "\u2019")  # the last two: closing quotation marks
_AROUND_WORDS = ".,;:!?\"'()[]\u201c\u201d\u2018\u2019"

_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
# The end of a sentence within a line. A lower-case letter after it indicates an abbreviation, such as `e.g. this`.
_SENTENCE_END = re.compile(r"""[.!?]["'\u201d\u2019)\]]*[^\S\n]+(?=[^\sa-z])""")


class Document:
    """Text with measures that are computed once, when a rule needs them.

    Denominators are at least 1, so that every measure of an empty text is 0.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_characters = len(text)
        self.num_newlines = text.count("\n")

    @cached_property
    def words(self) -> Words:
        """Words of the text, encoded as integers."""
        return number_words(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not blank, stripped."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """Paragraphs, separated by blank lines."""
        return [paragraph for paragraph in map(str.strip, _PARAGRAPH_BREAK.split(self.text)) if paragraph]

    @cached_property
    def line_repeats(self) -> tuple[int, int]:
        """Number of lines that repeat an earlier line, and their characters."""
        return count_repeats(self.lines)

    @cached_property
    def paragraph_repeats(self) -> tuple[int, int]:
        """Number of paragraphs that repeat an earlier paragraph, and their characters."""
        return count_repeats(self.paragraphs)

    @cached_property
    def ngrams(self) -> NgramCharacters:
        """Characters within repeated n-grams."""
        return count_ngram_characters(self.words)

    @cached_property
    def mean_word_length(self) -> float:
        """Mean characters per word, including adjacent punctuation."""
        return self.per_word(int(self.words.lengths.sum()))

    @cached_property
    def num_symbols(self) -> int:
        """Number of hashes or of ellipses, whichever is larger."""
        return max(self.text.count("#"), sum(map(self.text.count, _ELLIPSES)))

    @cached_property
    def num_alphabetic_words(self) -> int:
        """Number of words with at least one letter of any alphabet."""
        has_letter = np.array([any(map(str.isalpha, word)) for word in self.words.distinct], dtype=np.bool_)  # [V]
        return int(self.words.counts[has_letter].sum())

    @cached_property
    def num_stop_words(self) -> int:
        """Number of distinct stop words that occur, ignoring case and adjacent punctuation."""
        return len(STOP_WORDS.intersection(word.strip(_AROUND_WORDS).lower() for word in self.words.distinct))

    @cached_property
    def num_sentences(self) -> int:
        """Number of sentences; each line counts as at least one."""
        return len(self.lines) + len(_SENTENCE_END.findall(self.text))

    def per_word(self, count: int) -> float:
        """Return a count divided by the number of words."""
        return count / max(1, len(self.words))

    def per_character(self, count: int) -> float:
        """Return a count divided by the number of characters."""
        return count / max(1, self.num_characters)

    def share_of_lines(self, holds: Callable[[str], bool]) -> float:
        """Return the fraction of lines for which a predicate is true."""
        return sum(map(holds, self.lines)) / max(1, len(self.lines))


def is_bullet(line: str) -> bool:
    """Return whether a line begins with a bullet or a hyphen."""
    return line.startswith(_BULLETS)


def is_cut_off(line: str) -> bool:
    """Return whether a line ends in an ellipsis."""
    return line.endswith(_ELLIPSES)


def is_punctuated(line: str) -> bool:
    """Return whether a line ends in . ? ! or a quotation mark, including an ellipsis of three dots."""
    return line.endswith(_TERMINAL_PUNCTUATION)


def is_short(line: str) -> bool:
    """Return whether a line has at most 30 characters."""
    return len(line) <= SHORT_LINE_CHARACTERS
