"""The option files of conf/quality by numbers, and what is answered to a wrong rule."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.errors import ConfigError
from recipes.prepare.quality import RULES, check_rules

CONF = Path(__file__).parents[3] / "conf" / "quality"


def read_option(*names: str) -> dict[str, Any]:
    rules: dict[str, Any] = {}
    for name in names:
        rules |= yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    return rules


ALL = read_option("gopher", "c4", "fineweb")


def test_the_option_files_have_the_published_limits() -> None:
    assert read_option("none") == {}
    assert read_option("gopher") == {
        "min_words": 50,
        "max_words": 100_000,
        "min_mean_word_length": 3,
        "max_mean_word_length": 10,
        "max_symbols_per_word": 0.1,
        "max_bullet_lines": 0.9,
        "max_ellipsis_lines": 0.3,
        "min_alphabetic_words": 0.8,
        "min_stop_words": 2,
        "max_duplicate_lines": 0.3,
        "max_duplicate_paragraphs": 0.3,
        "max_duplicate_line_characters": 0.2,
        "max_duplicate_paragraph_characters": 0.2,
        **{f"max_top_{n}gram_characters": limit for n, limit in ((2, 0.20), (3, 0.18), (4, 0.16))},
        **{f"max_duplicate_{n}gram_characters": (20 - n) / 100 for n in range(5, 11)},
    }
    assert read_option("c4") == {
        "remove_citation_marks": True,
        "remove_unpunctuated_lines": True,
        "min_words_per_line": 3,
        "remove_javascript_lines": True,
        "remove_policy_lines": True,
        "min_sentences": 5,
        "max_curly_brackets": 0,
        "max_lorem_ipsum": 0,
    }
    assert read_option("fineweb") == {
        "min_punctuated_lines": 0.12,
        "max_short_lines": 0.67,
        "max_repeated_line_characters": 0.01,
        "max_newlines_per_word": 0.3,
    }


def test_the_options_combine_to_all_rules_without_a_name_in_common() -> None:
    assert set(ALL) == set(RULES)
    assert sum(len(read_option(name)) for name in ("gopher", "c4", "fineweb")) == len(RULES)
    check_rules(ALL)
    check_rules(dict.fromkeys(ALL))
    check_rules({})


def test_each_rule_is_described_in_one_sentence() -> None:
    for name, rule in RULES.items():
        assert rule.description[0].isupper(), name
        assert rule.description.endswith("."), name


def test_an_unknown_rule_is_answered_with_the_closest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules({"min_words": 50, "min_word": 40})
    assert caught.value.args == ("quality.min_word=40", "there is no such rule", "quality.min_words=40")


def test_an_unknown_rule_like_no_other_is_answered_with_the_options() -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules({"zzz": None})
    assert caught.value.setting == "quality.zzz=null"
    assert caught.value.fix == "quality=[gopher,c4,fineweb], which have all rules, without quality.zzz=null"


@pytest.mark.parametrize(
    ("rule", "limit", "setting", "expected"),
    [
        ("min_words", -3, "quality.min_words=-3", "a whole number of 0 or more"),
        ("min_words", 2.5, "quality.min_words=2.5", "a whole number of 0 or more"),
        ("min_words", True, "quality.min_words=true", "a whole number of 0 or more"),
        ("min_words_per_line", "3", "quality.min_words_per_line=3", "a whole number of 0 or more"),
        ("max_short_lines", 1.01, "quality.max_short_lines=1.01", "a number from 0 to 1"),
        ("max_short_lines", float("nan"), "quality.max_short_lines=nan", "a number from 0 to 1"),
        ("max_symbols_per_word", -0.1, "quality.max_symbols_per_word=-0.1", "a number of 0 or more"),
        ("max_symbols_per_word", float("inf"), "quality.max_symbols_per_word=inf", "a number of 0 or more"),
        ("remove_policy_lines", 1, "quality.remove_policy_lines=1", "true or false"),
    ],
)
def test_a_limit_of_the_wrong_kind_or_range_is_refused(rule: str, limit: object, setting: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules({rule: limit})
    fix = f"quality.{rule}=<{expected}>, or null to switch the rule off"
    assert caught.value.args == (setting, f"its limit is {expected}", fix)


@pytest.mark.parametrize(
    ("rule", "limit"),
    [("max_short_lines", 0), ("max_short_lines", 1), ("max_newlines_per_word", 7.5), ("min_words", 0)],
)
def test_a_limit_at_the_end_of_its_range_is_accepted(rule: str, limit: float) -> None:
    check_rules({rule: limit})


@pytest.mark.parametrize("measured", ["words", "mean_word_length"])
def test_a_minimum_above_the_maximum_is_refused(measured: str) -> None:
    check_rules({f"min_{measured}": 9, f"max_{measured}": 9})
    with pytest.raises(ConfigError) as caught:
        check_rules({f"min_{measured}": 10, f"max_{measured}": 9})
    assert caught.value.args == (
        f"quality.min_{measured}=10",
        f"no text passes it and quality.max_{measured}=9",
        f"quality.min_{measured}=<at most 9>",
    )
