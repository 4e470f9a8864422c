"""Rows that compare answers in another way than `chosen` and `rejected`: what they are, and what to type for them.

Published datasets name the better answer in a field of its own, rank a list of answers, or score single ones. None of
these can be mapped by names of fields alone, and a mapping that reads half of it learns wrong preferences.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.errors import ConfigError, shell, type_setting

Row = Mapping[str, Any]

# field that says which of two answers is better -> pairs of their fields, and in jq that the first is, and that one is
_DECIDERS: dict[str, tuple[tuple[tuple[str, str], ...], str, str]] = {
    "better_response_id": ((("response_0", "response_1"),), ". == 0", "true"),
    "safer_response_id": ((("response_0", "response_1"),), ". == 0", "true"),
    "preference_strength": ((("response_1", "response_2"),), ". < 0", ". != 0"),
    "labels": ((("human_ref_A", "human_ref_B"),), ". == 1", "true"),
    "winner": (
        (("conversation_a", "conversation_b"), ("response_a", "response_b")),
        '. == "model_a"',
        '. == "model_a" or . == "model_b"',
    ),
}
_SCORED = (("score_0", ("answer_0", "answer_1")), ("score_A", ("human_ref_A", "human_ref_B")))
_SCORES = ("overall_score", "score", "rating", "helpfulness", "reward")  # higher is better
_RANKS = ("rank",)  # lower is better
_QUESTIONS = ("prompt", "question", "instruction", "history", "input", "query", "context")
_ANSWERS = ("response", "answer", "completion", "output", "text", "content")
_BETTER_FIRST = (("response_j", "response_k"), ("real", "generated"))  # of stack-exchange-paired, and of SPIN
_NEXT = "< <these rows as JSONL> > <new file>, then its path"
# scores beside the answers of a pair
_PAIRS_OF_SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_avg_rating", "rejected_avg_rating"),
)


def check_decided(row: Row, answers: tuple[str, str], place: str) -> None:
    """Check that no other field says, row by row, which of the fields of two answers holds the better one.

    Raises:
        ConfigError: One does.
    """
    for name, (pairs, _, _) in _DECIDERS.items():
        if row.get(name) is not None and any({*answers} == {*pair} for pair in pairs):
            raise _name_decider(row, name, place)


def scores_disagree(row: Row) -> bool:
    """Return whether the row gives its rejected answer the higher score."""
    for chosen, rejected in _PAIRS_OF_SCORES:
        if _is_number(row.get(chosen)) and _is_number(row.get(rejected)):
            return bool(row[chosen] < row[rejected])
    return False


def name_prompt(row: Row) -> str:
    """Return the override that names the field of the prompt, of a row without a `prompt`."""
    names = [name for name in _QUESTIONS if isinstance(row.get(name), str)]
    names += [name for name, value in row.items() if name not in ("chosen", "rejected") and _are_messages(value)]
    if names:
        return type_setting("data.fields", {"prompt": names[0]})
    return "'data.fields={prompt: <field of the question>}'"


def explain(row: Row, *, fields: Mapping[str, str | None], place: str) -> ConfigError | None:
    """Return what to type for a row without a chosen and a rejected answer; None if its layout is not known.

    Args:
        row: Its fields.
        fields: Those that are mapped already.
        place: File and line.
    """
    question = next((name for name in _QUESTIONS if isinstance(row.get(name), str | list)), None)
    for name, (pairs, _, _) in _DECIDERS.items():
        if name in row and any(first in row and second in row for first, second in pairs):
            return _name_decider(row, name, place)
    for name, (first, second) in _SCORED:
        if name in row and first in row and second in row:
            other = name[:-1] + {"0": "1", "A": "B"}[name[-1]]
            query = f"select(.{name} != .{other}) | {_sort(f'.{name} > .{other}', first, second, question)}"
            reason = f"its {name} and {other} say which of {first} and {second} is better"
            return ConfigError(place, reason, f"{shell('jq -c', query)} {_NEXT}")
    pair = next((pair for pair in [*_find_named(row), *_BETTER_FIRST] if pair[0] in row and pair[1] in row), None)
    if pair is not None:
        found: dict[str, str | None] = {"chosen": pair[0], "rejected": pair[1]}
        if question not in (None, "prompt", "question"):
            found = {"prompt": question, **found}
        reason = f"its answers are in {pair[0]} and {pair[1]}"
        return ConfigError(place, reason, type_setting("data.fields", {**fields, **found}))
    return _explain_scored(row, question, place)


def _explain_scored(row: Row, question: str | None, place: str) -> ConfigError | None:
    """Return what to type for a list of answers with ranks or scores, or for single answers with scores."""
    prompt = "" if question is None else f"prompt: .{question}, "
    for name, value in row.items():
        if not (isinstance(value, Sequence) and len(value) > 1 and all(isinstance(each, Mapping) for each in value)):
            continue
        answer = next((key for key in _ANSWERS if key in value[0]), None)
        score = next((key for key in (*_RANKS, *_SCORES) if _is_number(value[0].get(key))), None)
        if answer is not None and score is not None and "role" not in value[0]:
            better, worse = ("min_by", "max_by") if score in _RANKS else ("max_by", "min_by")
            chosen, rejected = (f".{name} | {function}(.{score}).{answer}" for function in (better, worse))
            query = f"{{{prompt}chosen: ({chosen}), rejected: ({rejected})}}"
            reason = f"its {name} are {len(value)} texts, each with its {score}, and a row has two answers"
            return ConfigError(place, reason, f"{shell('jq -c', query)} {_NEXT}")
    answer = next((key for key in _ANSWERS if isinstance(row.get(key), str) and key != question), None)
    score = next((key for key in _SCORES if _is_number(row.get(key))), None)
    if answer is None or score is None or question is None:
        return None
    chosen, rejected = (f"{function}(.{score}).{answer}" for function in ("max_by", "min_by"))
    apart = f"select((max_by(.{score}).{score}) > (min_by(.{score}).{score}))"
    query = f"group_by(.{question})[] | {apart} | {{prompt: .[0].{question}, chosen: {chosen}, rejected: {rejected}}}"
    reason = f"it has one {answer} and its {score}, and a row has two answers to a prompt"
    return ConfigError(place, reason, f"{shell('jq -sc', query)} {_NEXT}")


def _name_decider(row: Row, name: str, place: str) -> ConfigError:
    pairs, is_first, is_decided = _DECIDERS[name]
    first, second = next(pair for pair in pairs if pair[0] in row and pair[1] in row)
    question = next((each for each in _QUESTIONS if isinstance(row.get(each), str | list)), None)
    query = _sort(f".{name} | {is_first}", first, second, question)
    if is_decided != "true":
        query = f"select(.{name} | {is_decided}) | {query}"
    reason = f"its {name} says which of {first} and {second} is better, row by row"
    return ConfigError(place, reason, f"{shell('jq -c', query)} {_NEXT}")


def _sort(is_first: str, first: str, second: str, question: str | None) -> str:
    """Return a query of jq that names the better of two answers `chosen`."""
    prompt = "" if question is None else f"prompt: .{question}, "
    sorted_pair = f"(if ({is_first}) then [.{first}, .{second}] else [.{second}, .{first}] end) as [$c, $r]"
    return f"{sorted_pair} | {{{prompt}chosen: $c, rejected: $r}}"


def _find_named(row: Row) -> list[tuple[str, str]]:
    """Return the fields of answers whose names hold `chosen` and `rejected`."""
    return [
        (name, other)
        for name in row
        if "chosen" in name
        and (other := name.replace("chosen", "rejected")) in row
        and all(isinstance(row[each], str | list) for each in (name, other))
    ]


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, Mapping) and "role" in each for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
