"""Text measures used by the quality rules.

Words are split at white space, so punctuation belongs to the word it touches. Lines and paragraphs are those that are
not blank, without the white space around them.
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
# The end of a sentence within a line. A lower-case letter after it speaks for an abbreviation, such as `e.g. this`.
_SENTENCE_END = re.compile(r"""[.!?]["'\u201d\u2019)\]]*[^\S\n]+(?=[^\sa-z])""")


class Document:
    """A text and its measures, each computed once and only if a rule needs it.

    What is divided by counts as at least 1, so that every measure of an empty text is 0.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_characters = len(text)
        self.num_newlines = text.count("\n")

    @cached_property
    def words(self) -> Words:
        """Its words, as numbers."""
        return number_words(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """Its lines."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """Its paragraphs, separated by blank lines."""
        return [paragraph for paragraph in map(str.strip, _PARAGRAPH_BREAK.split(self.text)) if paragraph]

    @cached_property
    def line_repeats(self) -> tuple[int, int]:
        """How many lines occurred before, and their characters."""
        return count_repeats(self.lines)

    @cached_property
    def paragraph_repeats(self) -> tuple[int, int]:
        """How many paragraphs occurred before, and their characters."""
        return count_repeats(self.paragraphs)

    @cached_property
    def ngrams(self) -> NgramCharacters:
        """Characters within repeated n-grams."""
        return count_ngram_characters(self.words)

    @cached_property
    def mean_word_length(self) -> float:
        """Characters of a word, with the punctuation that touches it."""
        return self.per_word(int(self.words.lengths.sum()))

    @cached_property
    def num_symbols(self) -> int:
        """Hashes or ellipses, whichever are more."""
        return max(self.text.count("#"), sum(map(self.text.count, _ELLIPSES)))

    @cached_property
    def num_alphabetic_words(self) -> int:
        """Words that have a letter of any alphabet."""
        has_letter = np.array([any(map(str.isalpha, word)) for word in self.words.distinct], dtype=np.bool_)  # [V]
        return int(self.words.counts[has_letter].sum())

    @cached_property
    def num_stop_words(self) -> int:
        """How many of the stop words occur, in either case and whatever punctuation touches them."""
        return len(STOP_WORDS.intersection(word.strip(_AROUND_WORDS).lower() for word in self.words.distinct))

    @cached_property
    def num_sentences(self) -> int:
        """Sentences; each line is at least one."""
        return len(self.lines) + len(_SENTENCE_END.findall(self.text))

    def per_word(self, count: int) -> float:
        """Return a count divided by the number of words."""
        return count / max(1, len(self.words))

    def per_character(self, count: int) -> float:
        """Return a count divided by the number of characters."""
        return count / max(1, self.num_characters)

    def share_of_lines(self, holds: Callable[[str], bool]) -> float:
        """Return the share of lines of which something holds."""
        return sum(map(holds, self.lines)) / max(1, len(self.lines))


def is_bullet(line: str) -> bool:
    """Return whether a line begins with a bullet or a hyphen."""
    return line.startswith(_BULLETS)


def is_cut_off(line: str) -> bool:
    """Return whether a line ends in an ellipsis."""
    return line.endswith(_ELLIPSES)


def is_punctuated(line: str) -> bool:
    """Return whether a line ends in . ? ! or a quotation mark; an ellipsis of three dots does too."""
    return line.endswith(_TERMINAL_PUNCTUATION)


def is_short(line: str) -> bool:
    """Return whether a line has at most 30 characters."""
    return len(line) <= SHORT_LINE_CHARACTERS
