"""Each reward of conf/reward against scores by hand."""

from typing import Any

import pytest

from recipes.errors import ConfigError
from recipes.reward.exact_match import ExactMatch
from recipes.reward.format import Format
from recipes.reward.length import Length
from recipes.reward.numeric import Numeric, read_number
from recipes.reward.regex import Regex
from recipes.reward.vqa_accuracy import VQAAccuracy, normalize


def score(reward: Any, completion: str, reference: str = "") -> float:
    [found] = reward(prompts=[""], completions=[completion], references=[reference], rows=[{}])
    return found


@pytest.mark.parametrize(
    ("settings", "completion", "reference", "expected"),
    [
        ({}, " Paris\n", "Paris", 1.0),
        ({}, "paris", "Paris", 0.0),
        ({"ignore_case": True}, "paris", "Paris", 1.0),
        ({}, "Paris.", "Paris", 0.0),
        ({"answer_regex": "#### (.*)"}, "so\n#### 7 ", "long\n#### 7", 1.0),
        ({"answer_regex": "#### (.*)"}, "#### 7", "7", 1.0),
        ({"answer_regex": "#### (.*)"}, "7", "#### 7", 0.0),
    ],
)
def test_an_exact_match(settings: dict[str, Any], completion: str, reference: str, expected: float) -> None:
    reward = ExactMatch(weight=1.0, **({"answer_regex": None, "ignore_case": False} | settings))
    assert score(reward, completion, reference) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42.0),
        ("so x = -3.5.", -3.5),
        ("1,234,567.5 USD", 1234567.5),
        ("first 1, then 2", 2.0),
        ("1,2", 2.0),
        ("3/4", 0.75),
        ("12 %", 0.12),
        ("2e3", 2000.0),
        ("−7", -7.0),  # noqa: RUF001, a typeset minus
        ("$5", 5.0),
        ("x1", None),
        ("1/0", None),
        ("none", None),
        ("", None),
        ("9" * 500, None),
        ("1e999", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert read_number(text) == number


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [("It is 1,200.", "1.2e3", 1.0), ("0.33333333", "1/3", 1.0), ("0.333", "1/3", 0.0), ("", "3", 0.0)],
)
def test_numbers_are_equal_however_they_are_written(completion: str, reference: str, expected: float) -> None:
    assert score(Numeric(weight=1.0, answer_regex=None, relative_tolerance=1e-6), completion, reference) == expected


def test_references_without_numbers_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    reward = Numeric(weight=1.0, answer_regex=None, relative_tolerance=0.0)
    assert [score(reward, "3", "three"), score(reward, "3", "three")] == [0.0, 0.0]
    assert caplog.messages == ["reward=numeric: no expected answer holds a number, so that every score is 0"]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        ("<think>a</think>", 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
        ("<think></think><answer>c</answer>", 0.0),
        ("So: <think>a</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>c</answer> …", 0.0),
        ("<think><answer>a</answer></think><answer>c</answer>", 0.0),
    ],
)
def test_a_format_is_all_of_its_parts_and_nothing_else(completion: str, expected: float) -> None:
    assert score(Format(weight=1.0, tags=["think", "answer"]), completion) == expected


def test_a_regular_expression_is_found_anywhere() -> None:
    reward = Regex(weight=1.0, pattern=r"def \w+\(")
    assert [score(reward, "x\ndef f(a)"), score(reward, "f(a)")] == [1.0, 0.0]


@pytest.mark.parametrize(("unit", "text"), [("words", "a  b\n"), ("characters", "a")])
def test_a_length_falls_from_its_target_to_its_limit(unit: Any, text: str) -> None:
    reward = Length(weight=1.0, target=4, limit=8, unit=unit)
    assert [score(reward, text * (number // len(text.split()))) for number in (0, 4, 6, 8, 20)] == [1, 1, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Regex(weight=1.0, pattern="("), r"pattern is '\('; it is not a valid regular expression: .*; set \."),
        (lambda: ExactMatch(weight=1.0, answer_regex="(", ignore_case=False), "answer_regex is .*; set None"),
        (lambda: Length(weight=1.0, target=5, limit=5, unit="words"), "limit is 5; .* the target 5; set 6"),
        (lambda: Format(weight=1.0, tags=[]), r"tags is \[\]; a format has one part or more; set \['answer'\]"),
    ],
)
def test_settings_that_cannot_work_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" The Cat.\n", "cat"),
        ("Two dogs, a cat!", "2 dogs cat"),
        ("none", "0"),
        ("eleven", "eleven"),
        ("1,234.50 km", "1234.50 km"),
        ("U.S.A.", "usa"),
        ("2:50 p.m.", "2:50 pm"),
        ("red/blue", "red blue"),
        ("T-shirt", "t shirt"),
        ("dont", "don't"),
        ("Its the girl\u2019s", "its girl's"),
        ("whos there", "who's there"),
        ("5%", "5%"),
        ("", ""),
    ],
)
def test_an_answer_is_normalized_as_the_vqa_challenge_describes_it(text: str, expected: str) -> None:
    assert normalize(text) == expected


# of ten answers, each is left out once: (1 * 0 + 9 * 1/3) / 10, (2 * 1/3 + 8 * 2/3) / 10, (3 * 2/3 + 7 * 1) / 10
@pytest.mark.parametrize(
    ("num_equal", "num_answers", "expected"),
    [
        *((0, 10, 0.0), (1, 10, 0.3), (2, 10, 0.6), (3, 10, 0.9), (4, 10, 1.0), (10, 10, 1.0)),
        *((1, 5, 1 / 3), (2, 5, 2 / 3), (3, 5, 1.0), (5, 5, 1.0), (3, 3, 1.0)),
        *((1, 2, 0.5), (2, 2, 1.0), (1, 1, 1.0), (0, 1, 0.0)),
    ],
)
def test_vqa_accuracy_by_the_number_of_people_who_gave_an_answer(
    num_equal: int, num_answers: int, expected: float
) -> None:
    reward = VQAAccuracy(weight=1.0, answer_regex=None)
    texts = [*["The dog."] * num_equal, *[f"cat {number}" for number in range(num_answers - num_equal)]]
    for answers in (texts, [{"answer": text, "answer_id": number} for number, text in enumerate(texts)]):
        [found] = reward(prompts=["?"], completions=[" dog"], references=["cat 0"], rows=[{"answers": answers}])
        assert found == pytest.approx(expected, abs=1e-15)


def test_answers_in_a_cell_of_a_csv_file_are_those_of_people() -> None:
    reward = VQAAccuracy(weight=1.0, answer_regex=None)
    rows = [{"answers": '["cat", "cat", "cat"]'}, {"answers": "[cat"}]
    assert reward(prompts=["?"] * 2, completions=["cat", "cat"], references=["dog"] * 2, rows=rows) == [1.0, 1.0]


def test_without_answers_of_people_the_expected_one_is_the_only_one() -> None:
    assert score(VQAAccuracy(weight=1.0, answer_regex=None), "two", "2") == 1.0
    by_pattern = VQAAccuracy(weight=1.0, answer_regex="Answer: (.*)")
    assert score(by_pattern, "so\nAnswer: a dog", "Answer: dog") == 1.0
    assert score(by_pattern, "dog", "dog") == 0.0


def test_answers_that_are_no_texts_are_a_mistake_of_the_data() -> None:
    reward = VQAAccuracy(weight=1.0, answer_regex=None)
    with pytest.raises(ConfigError, match="the field answers of a row holds int, where it compares with texts"):
        reward(prompts=["?"], completions=["1"], references=["1"], rows=[{"answers": [1]}])
