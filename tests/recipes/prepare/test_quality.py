"""Quality rules by numbers: each at its limit and beyond it, and what is removed from a text."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.prepare.quality import RULES, clean, find_failures

CONF = Path(__file__).parents[3] / "conf" / "quality"


def read_option(*names: str) -> dict[str, Any]:
    rules: dict[str, Any] = {}
    for name in names:
        rules |= yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    return rules


ALL = read_option("gopher", "c4", "fineweb")

GOOD_PROSE = """\
The old harbour lies two miles north of the village, behind a long wall of grey stone. Fishermen still dry their nets
there in the morning, although most boats have moved to the larger port. On Sundays a small market opens beside the
lighthouse, with bread, cheese and apples from the farms inland.

Visitors often ask why the wall was built so high. Storms in the last century carried whole sheds into the sea, and
nobody wanted to rebuild them twice. Today it keeps the wind away from the gardens, which is why roses bloom here until
late in November.
"""

SPAM = "Best deals... #sale #cheap\n" * 30 + "- Click here\n- Buy now\n{{ banner }}\n" * 4


def repeat_ngram(n: int, ngram_characters: int, num_characters: int) -> str:
    """Return a text of a given length in which one n-gram of a given length occurs twice, and no other."""
    words = list("abcdefghij"[: n - 1])
    ngram = " ".join([*words, "k" * (ngram_characters - 2 * len(words))])
    assert len(ngram) == ngram_characters
    text = f"{ngram} y {ngram} "
    return text + "z" * (num_characters - len(text))


# rule, a text at its published limit, a text beyond it, and what is measured there
LIMITS: list[tuple[str, str, str, float]] = [
    ("min_words", "word " * 50, "word " * 49, 49),
    ("max_words", "word " * 100_000, "word " * 100_001, 100_001),
    ("min_mean_word_length", "ab abcd", "abc ab", 2.5),
    ("max_mean_word_length", "a" * 10, "a" * 10 + " " + "a" * 11, 10.5),
    ("max_symbols_per_word", "word " * 9 + "#word", "word " * 8 + "#word #word", 0.2),
    ("max_symbols_per_word", "word " * 8 + "#word word…", "word " * 8 + "word... word…", 0.2),
    ("max_bullet_lines", "\n".join(["• a"] * 9 + ["a"]), "\n".join(["  - a"] * 19 + ["a"]), 0.95),
    ("max_ellipsis_lines", "\n".join(["a..."] * 3 + ["a."] * 7), "\n".join(["a…  "] * 4 + ["a"] * 6), 0.4),
    ("min_alphabetic_words", "é1 b, C (d) 12", "a b c 1 -", 0.6),
    ("min_stop_words", "The rest: 'of'", "the THE the, they other", 1),
    ("max_duplicate_lines", "\n".join("aaaabcdefg"), "\n\n".join("aaaaabcdef"), 0.4),
    ("max_duplicate_paragraphs", "\n\n".join("aaaabcdefg"), "\n \n".join("aaaaabcdef"), 0.4),
    ("max_duplicate_line_characters", "aa\naa\nbbbb", "aaa\naaa\nbb", 0.3),
    ("max_duplicate_paragraph_characters", "aa\n\naa\n\nbb", "aaa\n\naaa\n\nbb", 0.25),
    ("max_top_2gram_characters", repeat_ngram(2, 20, 200), repeat_ngram(2, 20, 160), 0.25),
    ("max_top_3gram_characters", repeat_ngram(3, 18, 200), repeat_ngram(3, 18, 180), 0.2),
    ("max_top_4gram_characters", repeat_ngram(4, 16, 200), repeat_ngram(4, 16, 160), 0.2),
    ("max_duplicate_5gram_characters", repeat_ngram(5, 30, 200), repeat_ngram(5, 30, 150), 0.2),
    ("max_duplicate_6gram_characters", repeat_ngram(6, 28, 200), repeat_ngram(6, 28, 140), 0.2),
    ("max_duplicate_7gram_characters", repeat_ngram(7, 26, 200), repeat_ngram(7, 26, 130), 0.2),
    ("max_duplicate_8gram_characters", repeat_ngram(8, 24, 200), repeat_ngram(8, 24, 120), 0.2),
    ("max_duplicate_9gram_characters", repeat_ngram(9, 22, 200), repeat_ngram(9, 22, 110), 0.2),
    ("max_duplicate_10gram_characters", repeat_ngram(10, 20, 200), repeat_ngram(10, 20, 100), 0.2),
    ("min_sentences", 'He ran. "Why?" She sat!\nNo end\nIt is e.g. this.', "One. Two? Three!\nFour", 4),
    ("max_curly_brackets", "}", "if (x) { y }", 1),
    ("max_lorem_ipsum", "lorem dolor ipsum", "Lorem Ipsum dolor", 1),
    ("min_punctuated_lines", "\n".join(["a.", "b!\r", 'c"'] + ["d"] * 22), "\n".join(["a?", "b'"] + ["c"] * 23), 0.08),
    (
        "max_short_lines",
        "\n".join(["a" * 30] * 67 + ["b" * 31] * 33),
        "\n".join(["a" * 30] * 17 + ["b" * 31] * 3),
        0.85,
    ),
    ("max_repeated_line_characters", "a\na\n" + "b" * 98, "a\na\n" + "b" * 48, 0.02),
    ("max_newlines_per_word", "a\nb\nc\nd e f g h i j", "a\n\nb\nc\nd e f g h i j", 0.4),
]


@pytest.mark.parametrize(("rule", "passing", "failing", "measured"), LIMITS)
def test_a_text_passes_at_the_limit_and_fails_beyond_it(rule: str, passing: str, failing: str, measured: float) -> None:
    rules = {rule: ALL[rule]}
    assert find_failures(passing, rules) == {}
    assert find_failures(failing, rules) == {rule: measured}
    assert find_failures(failing, {rule: None}) == {}, "null switches it off"


def test_each_document_rule_is_tried_at_its_limit() -> None:
    assert {rule for rule, *_ in LIMITS} == {name for name, rule in RULES.items() if rule.measure is not None}


def test_hashes_and_ellipses_are_not_added() -> None:
    assert find_failures("# " + "word… " * 3, {"max_symbols_per_word": 0}) == {"max_symbols_per_word": 0.75}


def test_blank_lines_are_no_lines_and_an_abbreviation_ends_no_sentence() -> None:
    assert find_failures("a.\n\n  \nb", {"min_punctuated_lines": 1}) == {"min_punctuated_lines": 0.5}
    assert find_failures("Some, e.g. Bach.", {"min_sentences": 9}) == {"min_sentences": 2}, (
        "a capital letter misleads it"
    )
    assert find_failures("Some, e.g. cats.", {"min_sentences": 9}) == {"min_sentences": 1}


def test_failures_come_in_the_order_of_the_rules_whatever_that_of_the_limits() -> None:
    limits = {"max_newlines_per_word": 0, "min_sentences": 5, "min_words": 50}
    assert list(find_failures("a\nb", limits)) == ["min_words", "min_sentences", "max_newlines_per_word"]


@pytest.mark.parametrize("text", ["", "\n", " \n\t\n"])
def test_an_empty_text_fails_every_minimum_and_no_share(text: str) -> None:
    assert find_failures(clean(text, ALL)[0], {**ALL, "max_newlines_per_word": None}) == {
        "min_words": 0,
        "min_mean_word_length": 0,
        "min_alphabetic_words": 0,
        "min_stop_words": 0,
        "min_sentences": 0,
        "min_punctuated_lines": 0,
    }


def test_a_text_of_one_word_is_measured_like_any_other() -> None:
    assert find_failures("with", ALL) == {
        "min_words": 1,
        "min_stop_words": 1,
        "min_sentences": 1,
        "min_punctuated_lines": 0,
        "max_short_lines": 1,
    }


def test_good_prose_passes_all_rules_and_stays_the_same() -> None:
    assert clean(GOOD_PROSE.replace("\n", " "), read_option("c4"))[1] == {}
    wrapped = {**ALL, "remove_unpunctuated_lines": None}  # the lines are wrapped
    assert clean(GOOD_PROSE, wrapped) == (GOOD_PROSE, {})
    assert find_failures(GOOD_PROSE, ALL) == {}


def test_spam_fails_the_rules_that_it_breaks() -> None:
    assert list(find_failures(SPAM, read_option("gopher"))) == [
        "max_symbols_per_word",
        "min_stop_words",
        "max_duplicate_lines",
        "max_duplicate_line_characters",
        *(f"max_top_{n}gram_characters" for n in (2, 3, 4)),
        *(f"max_duplicate_{n}gram_characters" for n in range(5, 11)),
    ]
    assert list(find_failures(SPAM, read_option("c4"))) == ["max_curly_brackets"]
    assert find_failures(SPAM, read_option("fineweb")) == {
        "min_punctuated_lines": 0,
        "max_short_lines": 1,
        "max_repeated_line_characters": (29 * 26 + 3 * (12 + 9 + 12)) / (30 * 26 + 4 * (12 + 9 + 12)),
    }
    assert clean(SPAM, read_option("c4")) == ("", {"remove_unpunctuated_lines": 42})


def test_each_line_counts_for_the_first_rule_that_it_breaks() -> None:
    text = (
        "No end\nNice.\nTurn JavaScript on now.\nWe use cookies, see our privacy policy.\nThis one stays.\njavascript"
    )
    assert clean(text, read_option("c4")) == (
        "This one stays.",
        {
            "remove_unpunctuated_lines": 2,
            "min_words_per_line": 1,
            "remove_javascript_lines": 1,
            "remove_policy_lines": 1,
        },
    )


@pytest.mark.parametrize(
    ("rule", "kept", "removed"),
    [
        (
            "remove_unpunctuated_lines",
            ["a.", "a?", "a!", 'a"', "a'", "a.\u201d", "a. \t\r"],
            ["a", "a,", "a...", "a…", "a:"],
        ),
        ("min_words_per_line", ["a b c", " a b c d", "a\tb  c"], ["a b", "a", "a b "]),
        ("remove_javascript_lines", ["Java Script"], ["Enable JavaScript.", "JAVASCRIPT"]),
        (
            "remove_policy_lines",
            ["Cookies are baked.", "A policy."],
            [
                "Terms of Use",
                "privacy policy",
                "Cookie policy",
                "It uses cookies",
                "the use of cookies",
                "we use cookies",
            ],
        ),
    ],
)
def test_a_line_rule_removes_these_lines_and_keeps_those(rule: str, kept: list[str], removed: list[str]) -> None:
    rules = {rule: ALL[rule]}
    text = "\n".join([*kept, *removed])
    assert clean(text, rules) == ("\n".join(kept), {rule: len(removed)})
    assert clean(text, {rule: None}) == (text, {})


def test_citation_marks_are_cut_out_with_the_blank_before_them_and_counted() -> None:
    text = "Roses bloom.[1][23] Lilies [citation needed] do too. [4]\nHistory[edit]\nx[i] [a] []"
    expected = "Roses bloom. Lilies do too.\nHistory\nx[i] [a] []"
    assert clean(text, {"remove_citation_marks": True}) == (expected, {"remove_citation_marks": 5})
    assert clean(text, {"remove_citation_marks": False}) == (text, {})


def test_a_line_that_ends_in_a_citation_mark_is_judged_without_it() -> None:
    kept = clean("Roses bloom here.[7]\nSee also[8]\n", read_option("c4"))
    assert kept == ("Roses bloom here.\n", {"remove_citation_marks": 2, "remove_unpunctuated_lines": 1})


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("A.\n\nmenu\n\nB.\n", "A.\n\nB.\n"),
        ("menu\n\nA.\n", "A.\n"),
        ("A.\n\nmenu\n", "A.\n"),
        ("A.\nmenu\nB.", "A.\nB."),
        ("A.\n\n\nB.\nmenu\n\nC.", "A.\n\n\nB.\n\nC."),
        ("menu\n", ""),
    ],
)
def test_a_removed_line_leaves_no_blank_lines_of_its_own(text: str, cleaned: str) -> None:
    assert clean(text, {"remove_unpunctuated_lines": True}) == (cleaned, {"remove_unpunctuated_lines": 1})


@pytest.mark.parametrize("text", ["", "\n\n\n", "  A line.\r\n\r\n\r\n\tAnother one. \n\n", "\u2028A.\x0c\n \n"])
def test_a_text_that_breaks_no_line_rule_stays_the_same_byte_for_byte(text: str) -> None:
    assert clean(text, {**ALL, "min_words_per_line": 1}) == (text, {})
    assert clean(text, read_option("gopher", "fineweb")) == (text, {}), "no line rules"
    assert clean(text, {}) == (text, {})
