"""The formats that people have give the same conversation."""

from typing import Any

import pytest

from recipes.data.instructions.conversation import Example, Reader
from recipes.errors import ConfigError

CHAT = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]


def read(row: dict[str, Any], *, format: str | None = None, **fields: str) -> Example:
    return Reader(format=format, fields=fields).read(row, place="a.jsonl:1")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"}]},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "1 + 1", "input": "", "output": "2"},
        {"instruction": "1 + 1", "output": "2"},
    ],
    ids=["messages", "sharegpt", "prompt and completion", "alpaca", "alpaca without input"],
)
def test_each_format_gives_the_same_conversation(row: dict[str, Any]) -> None:
    example = read(row)
    assert [*(example.prompt or []), *example.answer] == CHAT


def test_text_stays_text() -> None:
    assert read({"prompt": "a", "completion": "b"}) == Example(place="a.jsonl:1", prompt="a", answer="b")
    assert read({"text": "a"}) == Example(place="a.jsonl:1", prompt=None, answer="a")


def test_the_input_of_alpaca_follows_its_instruction() -> None:
    prompt = read({"instruction": "Add.", "input": "1, 1", "output": "2"}).prompt
    assert prompt == [{"role": "user", "content": "Add.\n\n1, 1"}]


def test_fields_of_other_names_are_mapped() -> None:
    row = {"dialog": [{"speaker": "user", "said": "1 + 1"}, {"speaker": "assistant", "said": "2"}]}
    assert read(row, messages="dialog", role="speaker", content="said").answer == CHAT
    assert read({"question": "a", "answer": "b"}, prompt="question", completion="answer").prompt == "a"


def test_a_format_by_name_is_the_one_that_is_read() -> None:
    row = {"messages": CHAT, "text": "plain"}
    assert read(row).answer == CHAT
    assert read(row, format="text").answer == "plain"


def test_tool_calls_and_tools_reach_the_template() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    example = read({"messages": [CHAT[0], call], "tools": [{"name": "add"}]})
    assert example.answer[1] == {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    assert example.tools == [{"name": "add"}]


def test_rows_that_ask_the_same_have_one_question() -> None:
    questions = [read({"messages": [CHAT[0], {"role": "assistant", "content": answer}]}).question for answer in "23"]
    assert questions[0] == questions[1]
    assert read({"messages": [{"role": "user", "content": "x"}, CHAT[1]]}).question != questions[0]
    assert read({"prompt": "a", "completion": "b"}).question == read({"prompt": "a", "completion": "c"}).question


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"a": 1}, {}, "its fields are a, expected messages; conversations; prompt and completion"),
        ({}, {}, "its fields are none"),
        ({"messages": "hi"}, {}, "its messages are not a list of objects"),
        ({"messages": [{"role": "robot", "content": "x"}]}, {}, "its role role='robot' is not one of system"),
        ({"messages": [{"content": "x"}]}, {}, "its role role=None is not one of"),
        ({"messages": [{"role": "user"}]}, {}, "a message of role user has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, {}, "its content of a message is not text but int"),
        ({"prompt": 1, "completion": "b"}, {}, "its prompt is not text but int"),
        ({"instruction": "a", "output": ["b"]}, {}, "its output is not text but list"),
        ({"instruction": "a", "input": 0, "output": "b"}, {}, "its input is not text but int"),
        ({"prompt": "a\ud800", "completion": "b"}, {}, "its prompt has half a character"),
        ({"messages": CHAT, "tools": "{"}, {}, "its tools are text that is not valid JSON"),
        ({"messages": CHAT, "tools": 3}, {}, "its tools are not a list but int"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, {}, "its role from='alien' is not one of"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(row: dict[str, Any], fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(row, **fields)
    assert caught.value.setting == "a.jsonl:1"


def test_a_missing_field_of_a_named_format_is_named() -> None:
    with pytest.raises(ConfigError, match="it has no field text; its fields are prompt"):
        read({"prompt": "a"}, format="text")


def test_a_mapping_of_no_known_name_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"data.fields.mesages: it maps the names of a format"):
        Reader(format=None, fields={"mesages": "dialog"})


def test_a_mapped_field_is_read_whatever_else_a_message_has() -> None:
    row = {
        "messages": [
            {"role": "zzz", "speaker": "user", "content": "FR", "content_en": "EN"},
            {"speaker": "assistant", "content_en": "x"},
        ]
    }
    assert read(row, role="speaker", content="content_en").answer[0] == {"role": "user", "content": "EN"}
    shared = {"conversations": [{"from": "human", "value": "q", "role": "x", "content": "other"}]}
    assert read(shared).answer == [{"role": "user", "content": "q"}]


def test_a_format_that_is_mapped_comes_before_one_that_a_row_has_as_well() -> None:
    row = {"body": "long", "prompt": "a", "completion": "b"}
    assert read(row, text="body").answer == "long"
    assert read(row).answer == "b"


def test_tools_may_be_json_within_the_json() -> None:
    assert read({"messages": CHAT, "tools": '[{"name": "add"}]'}).tools == [{"name": "add"}]
    assert read({"messages": CHAT, "tools": ""}).tools is None


def test_conversations_that_begin_with_the_same_question_have_one_question() -> None:
    longer = [*CHAT, {"role": "user", "content": "more"}, {"role": "assistant", "content": "3"}]
    assert read({"messages": longer}).question == read({"messages": CHAT}).question
    greeted = [{"role": "assistant", "content": "Hello!"}, *CHAT]
    other = [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "x"}, CHAT[1]]
    assert read({"messages": greeted}).question != read({"messages": other}).question
