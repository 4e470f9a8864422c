"""Score an answer about an image by the answers of several people, as the VQA challenge does.

The metric is that of Antol et al. 2015 (arXiv:1505.00468) and Goyal et al. 2017 (arXiv:1612.00837, VQA v2), as
https://visualqa.org/evaluation.html describes it: an answer is right if three of ten people gave it, and right in part
if fewer did; so that it compares with the accuracy of people, it is the mean over the ten ways to leave one of them
out. Before, both sides are normalized.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from recipes.errors import ConfigError
from recipes.reward import compile_pattern, find_part

_FIELD = "answers"
_ENOUGH = 3  # people who gave an answer that is right
_LEFT_OUT_FROM = 10  # people: of fewer, none is left out
_NUMBERS = {"none": "0"} | {
    word: str(number)
    for number, word in enumerate("zero one two three four five six seven eight nine ten".split())  # noqa: SIM905
}
_ARTICLES = ("a", "an", "the")
# end of a contraction -> words before it with which it is one without its apostrophe, too; not `ill`, `its`, `were` and
# others that are also words
_CONTRACTED = {
    "n't": "ai are ca could did does do had has have is might must need ought sha should was were wo would",
    "'ve": "could i might must not should they we what where who would you",
    "'ll": "how it somebody someone something they what who why you",
    "'d": "he how it someone something there they where who you",
    "'re": "there they what why you",
    "'s": "he how somebody someone that there what when where who why",
    "'m": "i",
    "'all": "y",
    "'am": "ma",
    "'clock": "o",
    "'twas": "",
}
_BETWEEN_DIGITS = re.compile(r"(?<=\d),(?=\d)")
_PERIOD = re.compile(r"(?<!\d)\.|\.(?!\d)")  # but the point of a decimal
_PUNCTUATION = re.compile(r"""[;/\[\]"()=+\\_\-<>@`,?!]""")  # neither the apostrophe nor the colon of a time


def _list_contractions() -> Iterator[tuple[str, str]]:
    for end, words in _CONTRACTED.items():
        for word in words.split() or [""]:
            yield f"{word}{end}".replace("'", ""), f"{word}{end}"


_CONTRACTIONS = dict(_list_contractions())


class VQAAccuracy:
    """Gives 1 where at least three people gave the answer, and a part of that where one or two did.

    With ten answers or more it is the mean over leaving each of them out, 0.3 for one, 0.6 for two and 0.9 for three
    of ten. With three to nine it is a third for each that is equal, at most 1; with one or two, the fraction of them.

    The answers are in the field `answers` of the row, texts or objects with `answer`, as VQA v2, OK-VQA, TextVQA and
    VizWiz have them; of a row without it, the expected answer is the only one.

    Args:
        weight: Factor in the sum of all rewards.
        answer_regex: Regular expression for the part of a completion to compare: the first group of its last match. A
            completion without a match is wrong. None compares all.
    """

    def __init__(self, *, weight: Annotated[float, ">= -1000, <= 1000"], answer_regex: str | None) -> None:
        self.weight = weight
        self._pattern = compile_pattern("answer_regex", answer_regex)

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """Return the accuracy of each completion, from 0 to 1.

        Raises:
            ConfigError: The answers of a row are something else than texts.
        """
        return [self._judge(*each) for each in zip(completions, references, rows, strict=True)]

    def _judge(self, completion: str, reference: str, row: Mapping[str, Any]) -> float:
        given = find_part(self._pattern, completion)
        answers = _read_answers(row)
        if not answers:
            part = find_part(self._pattern, reference)
            answers = [reference if part is None else part]
        if given is None:
            return 0.0
        return share_agreement([normalize(answer) for answer in answers].count(normalize(given)), len(answers))


def share_agreement(num_equal: int, num_answers: int) -> float:
    """Return the accuracy of an answer that so many of so many people gave."""
    if num_answers < _LEFT_OUT_FROM:
        return min(1.0, num_equal / min(_ENOUGH, num_answers))
    # without one of those who gave it, and without one of the others
    without_equal, without_other = (min(_ENOUGH, number) for number in (num_equal - 1, num_equal))
    return (num_equal * without_equal + (num_answers - num_equal) * without_other) / (_ENOUGH * num_answers)


def normalize(answer: str) -> str:
    """Return an answer in lower case, without articles and punctuation, its numbers up to ten as digits.

    `dont` is `don't`. Of punctuation, apostrophes, colons and the point of a decimal stay, and 1,000 is 1000.
    """
    text = _BETWEEN_DIGITS.sub("", answer.lower().replace("\u2019", "'"))
    words = _PUNCTUATION.sub(" ", _PERIOD.sub("", text)).split()
    numbered = (_NUMBERS.get(word, word) for word in words)
    return " ".join(_CONTRACTIONS.get(word, word) for word in numbered if word not in _ARTICLES)


def _read_answers(row: Mapping[str, Any]) -> list[str]:
    """Return the answers of a row; none if it has no field for them.

    Raises:
        ConfigError: They are something else than texts.
    """
    value = row.get(_FIELD)
    if value is None:
        return []
    if isinstance(value, str) and value.startswith("["):  # in a CSV file, whose cells are text
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    listed = value if isinstance(value, list | tuple) else [value]
    texts = [each.get("answer") if isinstance(each, Mapping) else each for each in listed]
    if not all(isinstance(text, str) for text in texts):
        other = next(type(text).__name__ for text in texts if not isinstance(text, str))
        reason = f"the field {_FIELD} of a row holds {other}, where it compares with texts"
        fix = f'{_FIELD} as a list of texts, or of {{"answer": <text>}}, in the rows, or reward=exact_match'
        raise ConfigError("reward=vqa_accuracy", reason, fix)
    return [str(text) for text in texts]
