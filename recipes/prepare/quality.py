"""Document quality rules of Gopher, C4 and FineWeb, each with its own limit.

Line rules change a text (`clean`), document rules reject it (`find_failures`); a value at the limit passes. Intended
for English web pages: code and languages without spaces fail. document.py defines words, lines and measures.

Sources: Gopher arXiv 2112.11446 appendix A.1.1, C4 arXiv 1910.10683 section 2.2, FineWeb arXiv 2406.17557 section 3.6.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any

import numpy as np

from recipes.errors import ConfigError
from recipes.prepare.repetition import (
    DUPLICATE_LENGTHS,
    TOP_LENGTHS,
    NgramCharacters,
    Words,
    count_ngram_characters,
    count_repeats,
    number_words,
)

# Text measures used by the quality rules.
#
# Words are split at white space, so adjacent punctuation belongs to a word. Blank lines and paragraphs do not count;
# surrounding white space is stripped.

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


_CITATION_MARK = re.compile(r"[ \t]?\[(?:\d+|edit|citation needed)\]")
_PHRASES = {
    "remove_javascript_lines": ("javascript",),
    "remove_policy_lines": (
        "terms of use",
        "privacy policy",
        "cookie policy",
        "uses cookies",
        "use of cookies",
        "use cookies",
    ),
}


@dataclass(frozen=True)
class Rule:
    """Quality rule.

    Attributes:
        description: One sentence for the report.
        kind: Kind of limit: `flag`, `count` (an integer), `share` (0 to 1) or `number` (0 or more).
        measure: Value that a document rule compares with its limit: an inclusive maximum if the name begins with
            `max_`, otherwise an inclusive minimum; None: a line rule.
    """

    description: str
    kind: str
    measure: Callable[[Document], float] | None = None


def _top(n: int) -> Rule:
    description = f"Share of the characters that are within the most frequent sequence of {n} words."
    return Rule(description, "share", lambda d: d.per_character(d.ngrams.top[n]))


def _duplicate(n: int) -> Rule:
    description = f"Share of the characters that are within sequences of {n} words that occurred before."
    return Rule(description, "share", lambda d: d.per_character(d.ngrams.duplicate[n]))


RULES: dict[str, Rule] = {
    # C4, line rules in order of evaluation
    "remove_citation_marks": Rule("Marks such as [1], [edit] and [citation needed] are cut out of lines.", "flag"),
    "remove_unpunctuated_lines": Rule("Lines must end in . ? ! or a quotation mark, not in an ellipsis.", "flag"),
    "min_words_per_line": Rule("Lines with fewer words are removed.", "count"),
    "remove_javascript_lines": Rule("Lines that mention JavaScript are removed.", "flag"),
    "remove_policy_lines": Rule("Lines about terms of use, privacy policy or cookies are removed.", "flag"),
    # Gopher, quality
    "min_words": Rule("Number of words.", "count", lambda d: len(d.words)),
    "max_words": Rule("Number of words.", "count", lambda d: len(d.words)),
    "min_mean_word_length": Rule("Mean length of a word in characters.", "number", lambda d: d.mean_word_length),
    "max_mean_word_length": Rule("Mean length of a word in characters.", "number", lambda d: d.mean_word_length),
    "max_symbols_per_word": Rule(
        "Hashes per word or ellipses per word, whichever are more.", "number", lambda d: d.per_word(d.num_symbols)
    ),
    "max_bullet_lines": Rule(
        "Share of lines that begin with a bullet.", "share", lambda d: d.share_of_lines(is_bullet)
    ),
    "max_ellipsis_lines": Rule(
        "Share of lines that end in an ellipsis.", "share", lambda d: d.share_of_lines(is_cut_off)
    ),
    "min_alphabetic_words": Rule(
        "Share of words that have a letter.", "share", lambda d: d.per_word(d.num_alphabetic_words)
    ),
    "min_stop_words": Rule(f"How many of {len(STOP_WORDS)} stop words occur.", "count", lambda d: d.num_stop_words),
    # Gopher, repetition
    "max_duplicate_lines": Rule(
        "Share of lines that occurred before.", "share", lambda d: d.line_repeats[0] / max(1, len(d.lines))
    ),
    "max_duplicate_paragraphs": Rule(
        "Share of paragraphs that occurred before.",
        "share",
        lambda d: d.paragraph_repeats[0] / max(1, len(d.paragraphs)),
    ),
    "max_duplicate_line_characters": Rule(
        "Share of the characters that are in lines that occurred before.",
        "share",
        lambda d: d.per_character(d.line_repeats[1]),
    ),
    "max_duplicate_paragraph_characters": Rule(
        "Share of the characters that are in paragraphs that occurred before.",
        "share",
        lambda d: d.per_character(d.paragraph_repeats[1]),
    ),
    **{f"max_top_{n}gram_characters": _top(n) for n in TOP_LENGTHS},
    **{f"max_duplicate_{n}gram_characters": _duplicate(n) for n in DUPLICATE_LENGTHS},
    # C4, document rules
    "min_sentences": Rule("Number of sentences.", "count", lambda d: d.num_sentences),
    "max_curly_brackets": Rule("Number of opening curly brackets.", "count", lambda d: d.text.count("{")),
    "max_lorem_ipsum": Rule("Mentions of lorem ipsum.", "count", lambda d: d.text.lower().count("lorem ipsum")),
    # FineWeb
    "min_punctuated_lines": Rule(
        "Share of lines that end in . ? ! or a quotation mark.", "share", lambda d: d.share_of_lines(is_punctuated)
    ),
    "max_short_lines": Rule(
        f"Share of lines of at most {SHORT_LINE_CHARACTERS} characters.", "share", lambda d: d.share_of_lines(is_short)
    ),
    "max_repeated_line_characters": Rule(
        "Share of the characters other than newlines that are in lines that occurred before.",
        "share",
        lambda d: d.line_repeats[1] / max(1, d.num_characters - d.num_newlines),
    ),
    "max_newlines_per_word": Rule("Newlines per word.", "number", lambda d: d.per_word(d.num_newlines)),
}

_LIMITS = {
    "flag": "true or false",
    "count": "a whole number of 0 or more",
    "share": "a number from 0 to 1",
    "number": "a number of 0 or more",
}


def check_rules(rules: Mapping[str, Any]) -> None:
    """Check the names and limits of rules; a limit of None disables its rule.

    Raises:
        ConfigError: A rule is unknown, a limit has the wrong type or range, or no text can pass.
    """
    for name, limit in rules.items():
        setting = f"quality.{name}={_format(limit)}"
        if name not in RULES:
            near = get_close_matches(str(name), RULES, 1)
            fix = (
                f"quality.{near[0]}={_format(limit)}"
                if near
                else f"quality=[gopher,c4,fineweb], which have all rules, without {setting}"
            )
            raise ConfigError(setting, "there is no such rule", fix)
        kind = RULES[name].kind
        if limit is not None and not _is_limit(limit, kind):
            fix = f"quality.{name}=<{_LIMITS[kind]}>, or null to switch the rule off"
            raise ConfigError(setting, f"its limit is {_LIMITS[kind]}", fix)
    for measured in ("words", "mean_word_length"):
        low, high = rules.get(f"min_{measured}"), rules.get(f"max_{measured}")
        if low is not None and high is not None and low > high:
            reason = f"no text passes it and quality.max_{measured}={high}"
            raise ConfigError(f"quality.min_{measured}={low}", reason, f"quality.min_{measured}=<at most {high}>")


def _is_limit(limit: object, kind: str) -> bool:
    if kind == "flag" or isinstance(limit, bool):  # a bool is an int
        return kind == "flag" and isinstance(limit, bool)
    if kind == "count":
        return isinstance(limit, int) and limit >= 0
    return isinstance(limit, int | float) and (0 <= limit <= 1 if kind == "share" else 0 <= limit < math.inf)


def _format(limit: object) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(limit), str(limit))


def find_failures(text: str, rules: Mapping[str, Any]) -> dict[str, float]:
    """Return the document rules that a text fails.

    Args:
        text: Any text, after `clean` if line rules are on.
        rules: Limits by name, as accepted by `check_rules`; line rules are ignored.

    Returns:
        The measured value of each rule that failed, in the order of `RULES`.
    """
    document = Document(text)
    failures: dict[str, float] = {}
    for name, rule in RULES.items():
        limit = rules.get(name)
        if limit is None or rule.measure is None:
            continue
        value = float(rule.measure(document))
        if value > limit if name.startswith("max_") else value < limit:
            failures[name] = value
    return failures


def clean(text: str, rules: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """Remove the lines that break a line rule.

    Blank lines never do. One that a removal leaves next to another, or at the beginning, is removed, too.

    Args:
        text: Any text.
        rules: Limits by name, as accepted by `check_rules`; document rules are ignored.

    Returns:
        The text, unchanged if no rule applied, and the number of lines removed by each rule that applied (citation
        marks: number of marks). A line that breaks several rules counts for the first in the order of `RULES`.
    """
    removed: dict[str, int] = {}
    if rules.get("remove_citation_marks"):
        text, removed["remove_citation_marks"] = _CITATION_MARK.subn("", text)
    checks = _line_checks(text, rules)
    removed.update(dict.fromkeys(checks, 0))
    kept = [""]  # acts as a preceding blank line
    after_removal = False
    for line in text.split("\n") if checks else ():
        bare = line.strip()
        broken = next((name for name, breaks in checks.items() if breaks(bare)), None) if bare else None
        if broken is not None:
            removed[broken] += 1
            after_removal = True
        elif bare or not after_removal or kept[-1].strip():
            kept.append(line)
            after_removal = False
    applied = {name: count for name, count in removed.items() if count}
    return ("\n".join(kept[1:]) if applied and checks else text), applied


def _line_checks(text: str, rules: Mapping[str, Any]) -> dict[str, Callable[[str], bool]]:
    """Return a check for each line rule that is on and may apply to a text: True if a line breaks the rule."""
    checks: dict[str, Callable[[str], bool]] = {}
    if rules.get("remove_unpunctuated_lines"):
        checks["remove_unpunctuated_lines"] = lambda line: not is_punctuated(line) or is_cut_off(line)
    min_words = rules.get("min_words_per_line")
    if min_words:
        # splits only as far as needed
        checks["min_words_per_line"] = lambda line: len(line.split(None, min_words - 1)) < min_words
    lowered = text.lower()
    for name, phrases in _PHRASES.items():
        present = [phrase for phrase in phrases if rules.get(name) and phrase in lowered]
        if present:
            checks[name] = partial(_mentions, phrases=present)
    return checks


def _mentions(line: str, *, phrases: list[str]) -> bool:
    lowered = line.lower()
    return any(phrase in lowered for phrase in phrases)
