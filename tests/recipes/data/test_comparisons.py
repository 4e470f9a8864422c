"""Rows of published datasets, read rightly, or answered by the command that makes them readable, which is run here."""

import json
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preference_rows import Row, assistant, chat, learned_of, samples_of, source_of, system, user

from recipes.errors import ConfigError

END = "<|endoftext|>"
H, A = "\n\nHuman:", "\n\nAssistant:"


def scores(chosen: float, rejected: float) -> Row:
    return {"chosen_score": chosen, "rejected_score": rejected}


def capybara(i: int) -> Row:
    shared = [user(f"{i}?"), assistant("o"), user("and?")]
    answers = {"chosen": [*shared, assistant("good")], "rejected": [*shared, assistant("bad")]}
    return {"conversation": [{"input": f"{i}?", "output": "o"}], **answers, **scores(5, 2)}


def as_json(i: int) -> Row:
    chosen, rejected = (json.dumps([user(f"{i}?"), assistant(text)]) for text in ("good", "bad"))
    return {"prompt": f"{i}?", "chosen": chosen, "rejected": rejected}


# Read as they are, or with a mapping: the row i, data.fields, and the prompt. Every better answer is "good".

Mapped = tuple[Callable[[int], Row], dict[str, str], Callable[[int], str]]
MAPPED: dict[str, Mapped] = {
    "argilla, chosen_response": (
        lambda i: {"instruction": f"{i}?", "chosen_response": "good", "rejected_response": "bad", "source": "x"},
        {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
        lambda i: f"{i}?",
    ),
    "argilla, input beside system": (
        lambda i: {"system": "Be brief", "input": f"{i}?", "chosen": "good", "rejected": "bad", "rating": [9.0, 8.0]},
        {"prompt": "input"},
        lambda i: chat(system("Be brief"), user(f"{i}?")),
    ),
    "stack-exchange-paired": (
        lambda i: {"question": f"{i}?", "response_j": "good", "response_k": "bad", "qid": i},
        {"chosen": "response_j", "rejected": "response_k"},
        lambda i: f"{i}?",
    ),
    "SPIN": (
        lambda i: {"real": [user(f"{i}?"), assistant("good")], "generated": [user(f"{i}?"), assistant("bad")]},
        {"chosen": "real", "rejected": "generated"},
        lambda i: chat(user(f"{i}?")),
    ),
    "UltraInteract, trajectory": (
        lambda i: {"trajectory": [user(f"{i}?")], "chosen": "good", "rejected": "bad"},
        {"prompt": "trajectory"},
        lambda i: chat(user(f"{i}?")),
    ),
    "capybara-dpo": (capybara, {}, lambda i: chat(user(f"{i}?")) + f"o{END}\n" + chat(user("and?"))),
    "messages as JSON in a column of text": (as_json, {}, lambda i: chat(user(f"{i}?"))),
    "a prompt that the transcripts hold": (
        lambda i: {"prompt": f"{i}?", "chosen": f"{H} {i}?{A} good", "rejected": f"{H} {i}?{A} bad"},
        {},
        lambda i: f"{H} {i}?{A}",
    ),
}


@pytest.mark.parametrize("layout", MAPPED)
def test_a_published_layout_is_read_by_the_mapping_that_its_error_names(layout: str, tmp_path: Path) -> None:
    make, fields, prompt_of = MAPPED[layout]
    rows = [make(i) for i in range(12)]
    if fields:
        with pytest.raises(ConfigError, match="rows.jsonl:1") as refused:
            source_of(tmp_path, rows)
        typed = ", ".join(f"{name}: {own}" for name, own in fields.items())
        assert refused.value.fix.strip("'") == f"data.fields={{{typed}}}"
    source = source_of(tmp_path, rows, fields=fields)
    prompts = {prompt_of(i) for i in range(12)}
    for chosen, rejected in samples_of(source):
        assert chosen[0] == rejected[0]
        assert chosen[0] in prompts
        assert (chosen[1].strip(), rejected[1].strip()) == (f"good{END}", f"bad{END}")


# Refused with a command: the row i.


def pku_safe_rlhf(i: int) -> Row:
    answers = ("good", "bad") if i % 2 == 0 else ("bad", "good")
    return {"prompt": f"{i}?", "response_0": answers[0], "response_1": answers[1], "better_response_id": i % 2}


def helpsteer2_preference(i: int) -> Row:
    strength = (-2, 0, 3)[i % 3]
    answers = {-2: ("good", "bad"), 0: ("so", "so so"), 3: ("bad", "good")}[strength]
    return {"prompt": f"{i}?", "response_1": answers[0], "response_2": answers[1], "preference_strength": strength}


def helpsteer2(i: int) -> Row:
    return {"prompt": f"{i // 2}?", "response": ("bad", "good")[i % 2], "helpfulness": (1, 4)[i % 2], "verbosity": 2}


def shp(i: int) -> Row:
    answers = ("bad", "good") if i % 2 == 0 else ("good", "bad")
    return {"history": f"{i}?", "human_ref_A": answers[0], "human_ref_B": answers[1], "labels": i % 2, "score_A": 3}


def webgpt(i: int) -> Row:
    sign = (1, -1)[i % 2]
    answers = ("good", "bad")[::sign]
    return {"question": f"{i}?", "answer_0": answers[0], "answer_1": answers[1], "score_0": sign, "score_1": -sign}


def arena(i: int) -> Row:
    winner = ("model_a", "model_b", "tie")[i % 3]
    texts = {"model_a": ("good", "bad"), "model_b": ("bad", "good"), "tie": ("a", "b")}[winner]
    first, second = ([user(f"{i}?"), assistant(text)] for text in texts)
    return {"winner": winner, "conversation_a": first, "conversation_b": second}


def nectar(i: int) -> Row:
    answers = [{"answer": text, "rank": rank} for text, rank in (("so", 2.0), ("good", 1.0), ("bad", 3.0))]
    return {"prompt": f"{i}?", "answers": answers[i % 3 :] + answers[: i % 3]}


def ultrafeedback(i: int) -> Row:
    answers = [{"response": text, "overall_score": score} for text, score in (("so", 5.0), ("good", 9.0), ("bad", 1.0))]
    return {"instruction": f"{i}?", "completions": answers[i % 3 :] + answers[: i % 3], "models": ["x"]}


DECIDED = (pku_safe_rlhf, helpsteer2_preference, shp, arena)


@pytest.mark.skipif(shutil.which("jq") is None, reason="runs jq")
@pytest.mark.parametrize("make", [*DECIDED, helpsteer2, webgpt, nectar, ultrafeedback])
def test_the_command_that_an_error_names_makes_pairs_whose_better_answer_is_the_chosen_one(
    make: Callable[[int], Row], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="rows.jsonl:1") as refused:
        source_of(tmp_path, [make(i) for i in range(24)])
    command = refused.value.fix.removesuffix(", then its path")
    command = command.replace("<these rows as JSONL>", "rows.jsonl").replace("<new file>", "pairs.jsonl")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) >= 12
    source = source_of(tmp_path, rows, name="again.jsonl")
    for chosen, rejected in samples_of(source):
        assert (chosen[1].strip(), rejected[1].strip()) == (f"good{END}", f"bad{END}")
        assert "?" in chosen[0]


@pytest.mark.parametrize("make", DECIDED)
def test_a_mapping_does_not_hide_the_field_that_says_which_answer_is_better(
    make: Callable[[int], Row], tmp_path: Path
) -> None:
    names = [name for name in make(0) if name.startswith(("response_", "human_ref_", "conversation_"))]
    question = next((name for name in ("prompt", "history") if name in make(0)), None)
    fields = dict(zip(("chosen", "rejected"), names, strict=True)) | ({"prompt": question} if question else {})
    with pytest.raises(ConfigError, match=r"says which of .* is better, row by row"):
        source_of(tmp_path, [make(i) for i in range(12)], fields=fields)


def test_pairs_whose_rejected_answer_has_the_higher_score_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"{i}?", "chosen": "good", "rejected": "bad", **scores(4, 4 - i % 2)} for i in range(12)]
    rows[4] |= scores(2, 3)
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source = source_of(tmp_path, rows)
    assert len(source.train()) + len(source.val()) == 11
    assert "because the rejected answer has the higher score: rows.jsonl:5" in caplog.text
    with pytest.raises(ConfigError, match="12 rows: the rejected answer has the higher score"):
        source_of(tmp_path, [row | scores(1, 2) for row in rows])


def test_messages_as_python_shows_them_are_refused_and_not_learned_as_text(tmp_path: Path) -> None:
    chosen, rejected = (str([user("a?"), assistant(text)]) for text in "bc")
    with pytest.raises(ConfigError, match="rows.jsonl:1: chosen: it is text that shows messages as Python does"):
        source_of(tmp_path, [{"prompt": "a?", "chosen": chosen, "rejected": rejected}])
    quoted = [{"prompt": f"{i}?", "chosen": "[1, 2]", "rejected": '[{"a": 1}]'} for i in range(12)]
    assert learned_of(source_of(tmp_path, quoted)) == {(f"[1, 2]{END}",), (f'[{{"a": 1}}]{END}',)}


def test_answers_that_begin_with_their_prompt_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = [f"What is {i}?" for i in range(12)]
    rows = [{"prompt": text, "chosen": f"{text} It is", "rejected": f"{text} No"} for text in asked]
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source_of(tmp_path, rows)
    assert "pairs begin with their prompt, which is then read twice" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source_of(tmp_path, [row | {"rejected": "No"} for row in rows])
    assert "read twice" not in caplog.text


def test_a_labelled_transcript_is_divided_before_its_last_answer(tmp_path: Path) -> None:
    rows = [{"completion": f"{H} {i}?{A} a{H} and?{A} b", "label": i % 2 == 0} for i in range(12)]
    source = source_of(tmp_path, rows, kind="answers")
    assert learned_of(source) == {(f" b{END}",)}


REFUSED: list[tuple[str, Row, str]] = [
    ("pairs", {"prompt": "a", "chosen": ["b"], "rejected": ["c"]}, "no texts and no lists of messages"),
    ("pairs", {"summary": "a", "chosen": "b", "rejected": "c"}, "it has no prompt"),
    ("answers", {"prompt": "a", "completion": "b", "label": -1}, "its label is -1"),
    ("answers", {"prompt": "a", "completion": "b", "label": "desirable"}, "its label is desirable"),
    ("answers", {"prompt": "a", "response": "b", "score": 2}, "it has one response and its score"),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "images": [1]}, "only text is trained on"),
]


@pytest.mark.parametrize(("kind", "row", "reason"), REFUSED)
def test_other_rows_are_refused_with_a_reason(kind: str, row: Row, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"rows.jsonl:1.*{reason}"):
        source_of(tmp_path, [row] * 3, kind=kind)


def test_a_null_answer_is_an_empty_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[Any] = [{"prompt": f"{i}?", "chosen": "good", "rejected": "bad"} for i in range(12)]
    rows[2]["rejected"] = rows[7]["chosen"] = None
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source = source_of(tmp_path, rows)
    assert "2 rows are left out, because an answer is empty: rows.jsonl:3, rows.jsonl:8" in caplog.text
    assert len(source.train()) + len(source.val()) == 10
