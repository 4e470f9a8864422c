"""The formats that people have give the same conversation."""

import json
import re
from datetime import date
from typing import Any

import pytest

from recipes.data.conversations.conversation import Example, Reader
from recipes.errors import ConfigError

CHAT = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]


def read(row: dict[str, Any], *, format: str | None = None, **fields: str | None) -> Example:
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
        ({"a\ud800": 1}, {}, r"its fields are a\\ud800, expected"),
        ({"messages": "hi"}, {}, "its messages are not a list of objects"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            {},
            'a message has role "robot", expected one of system',
        ),
        ({"messages": [{"content": "x"}]}, {}, "a message has no role, expected one of"),
        ({"messages": [{"role": "human", "content": "x"}]}, {}, 'has role "human", expected'),
        ({"messages": [{"role": "user"}]}, {}, "a message of role user has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, {}, "the content of a message is not text but a number"),
        ({"prompt": 1, "completion": "b"}, {}, "its prompt is not text but a number"),
        ({"instruction": "a", "output": ["b"]}, {}, "its output is not text but a list"),
        ({"instruction": "a", "input": 0, "output": "b"}, {}, "its input is not text but a number"),
        ({"prompt": "a\ud800", "completion": "b"}, {}, "its prompt has half a character"),
        ({"messages": CHAT, "tools": "{"}, {}, "its tools are text that is not valid JSON"),
        ({"messages": CHAT, "tools": 3}, {}, "its tools are not a list but a number"),
        ({"messages": CHAT, "tools": ["add"]}, {}, "its tools are not a list of objects"),
        ({"messages": CHAT, "tools": "[" * 100_000}, {}, "its tools are text that is not valid JSON"),
        ({"instruction": None, "output": "b"}, {}, "its instruction is null"),
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            {},
            'a message has from "alien", expected one of system',
        ),
        ({"messages": CHAT, "train": "false"}, {}, 'its train is text: "false"; type true or false there, without'),
        (
            {"messages": [CHAT[0], CHAT[1] | {"train": "no"}]},
            {},
            'train of a message is text: "no"; type true or',
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_named(row: dict[str, Any], fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(row, **fields)
    assert caught.value.setting == "a.jsonl:1"


def test_bytes_of_a_table_are_text_or_named() -> None:
    rows = [{"prompt": b"caf\xc3\xa9", "completion": text} for text in (b"good", b"caf\xe9")]
    reader = Reader(format=None, fields={})
    found = reader.read(rows[0], place="a row", from_table=True)
    assert (found.prompt, found.answer) == ("caf\u00e9", "good")
    with pytest.raises(ConfigError, match="its completion has bytes that are not UTF-8 text"):
        reader.read(rows[1], place="a row", from_table=True)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "responses": ["a"]},
        {"prompt": "q", "id": "x", "completions": ["a", "b"]},
        {"question": "q", "context": "c", "answers": {"text": ["a"], "answer_start": [0]}},
        {"instruction": "q", "candidates": [{"text": "a"}]},
    ],
)
def test_of_several_answers_to_a_question_no_remedy_learns_the_question(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="and a row has one answer; type a row for each answer") as caught:
        read(row)
    assert "data.fields" not in caught.value.fix


@pytest.mark.parametrize("row", [{"prompt": "q"}, {"question": "q", "id": 3}, {"prompt": "q", "context": "c"}])
def test_a_question_alone_is_no_text_to_learn(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="type 'data.fields={prompt: <field of the question>, completion: <"):
        read(row)


def test_a_mapping_of_fields_that_are_not_there_is_answered_with_what_can_be_typed() -> None:
    with pytest.raises(ConfigError, match="type the same command without data.fields"):
        read({"messages": CHAT}, messages="dialog")
    human = {"messages": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]}
    with pytest.raises(ConfigError, match="type 'data.fields={conversations: messages, from: role, value: content}'"):
        read(human)
    assert read(human, conversations="messages", **{"from": "role"}, value="content").answer[1]["content"] == "a"


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"prompt": "q", "completion": "a"}, {"prompt": "question"}),
        ({"prompt": "q", "completion": "a"}, {"completion": "answr"}),
        ({"instruction": "q", "input": "", "output": "a"}, {"instruction": "prompt"}),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, {"conversations": "x"}),
        ({"messages": CHAT}, {"role": "speaker"}),
        ({"text": "a"}, {"text": "body"}),
    ],
)
def test_rows_that_are_in_a_format_need_no_mapping(row: dict[str, Any], fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(row, **fields)
    assert caught.value.fix == "the same command without data.fields"


def test_a_missing_field_of_a_named_format_is_named() -> None:
    with pytest.raises(ConfigError, match="it has no field text; its fields are prompt"):
        read({"prompt": "a"}, format="text")
    with pytest.raises(ConfigError, match="it has no field messages; .*; type data.format=prompt_completion$"):
        read({"prompt": "a", "completion": "b"}, format="messages")


def test_a_mapping_of_no_known_name_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"data.fields.mesages: it maps the names of a format"):
        Reader(format=None, fields={"mesages": "dialog"})
    with pytest.raises(ConfigError, match=r"data.fields.label=3: it takes the name of a field, or null"):
        Reader(format=None, fields={"label": 3})  # type: ignore[dict-item]


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


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "system": "Be brief."},
        {"messages": [{"role": "system", "content": "Be brief."}, *CHAT]},
        {"messages": [{"role": "developer", "content": "Be brief."}, *CHAT]},
        {"messages": CHAT, "tools": [{"name": "add"}]},
        {"messages": [{"role": "assistant", "content": "Hello!"}, *CHAT]},
        {"messages": [CHAT[0], {"role": "user", "content": "Quickly!"}, CHAT[1]]},
        {"prompt": [{"role": "system", "content": "Be brief."}, CHAT[0]], "completion": CHAT[1:]},
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"}]},
        {"conversations": [{"from": "system", "value": "x"}, {"from": "human", "value": "1 + 1"}]},
        {"instruction": "1 + 1", "output": "2", "system": "Be brief."},
        {"instruction": "more", "output": "3", "history": [["1 + 1", "2"]]},
        {"prompt": "1 + 1", "completion": "2"},
    ],
)
def test_the_first_message_of_a_user_is_the_question_whatever_is_around_it(row: dict[str, Any]) -> None:
    assert read(row).question == "1 + 1"
    assert read({"messages": [{"role": "system", "content": "1 + 1"}, CHAT[1]]}).question != "1 + 1", "nobody asks"


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOL = {"name": "weather", "parameters": {"type": "object"}}
TYPED = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        # as in the examples of OpenAI, whose arguments are JSON text
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}],
        },
        {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
    ],
)
def test_a_call_has_one_form(message: dict[str, Any]) -> None:
    expected = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert read({"messages": [CHAT[0], message]}).answer[1] == expected


def test_a_function_call_of_sharegpt_is_a_call_and_its_tools_have_the_form_of_templates() -> None:
    turns = [("human", "Paris?"), ("function_call", TYPED), ("observation", "sunny"), ("gpt", "Sunny.")]
    row = {"conversations": [{"from": name, "value": text} for name, text in turns], "tools": json.dumps([TOOL])}
    example = read(row)
    assert [message["role"] for message in example.answer] == ["user", "assistant", "tool", "assistant"]
    assert example.answer[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert example.tools == [{"type": "function", "function": TOOL}]


def test_columns_that_only_other_rows_have_are_not_in_a_row_of_a_table() -> None:
    nested = {**CALL, "id": None, "function": {"name": "weather", "arguments": {"city": "Paris", "zone": None}}}
    row = {
        "messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [nested]}],
        "tools": [{"function": {**TOOL, "parameters": {"zone": None, "enum": ["a", None], "day": date(2024, 1, 1)}}}],
        "text": None,
    }
    found = Reader(format=None, fields={}).read(row, place="a.parquet row 1", from_table=True)
    assert found.answer[1]["tool_calls"] == [CALL]
    assert found.tools == [{"function": {**TOOL, "parameters": {"enum": ["a", None], "day": "2024-01-01"}}}]
    typed = read({"messages": row["messages"]})  # of JSON, where a null was written by a person
    assert typed.answer[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris", "zone": None}


@pytest.mark.parametrize("off", [0, 0.0, False])
@pytest.mark.parametrize("name", ["weight", "loss_weight", "train", "training", "loss"])
def test_an_answer_of_no_weight_is_not_learned(name: str, off: Any) -> None:
    chat = [CHAT[0], {**CHAT[1], name: off}, CHAT[0], {**CHAT[1], name: 1}]
    example = read({"messages": chat})
    assert (example.answer, example.without_loss) == (CHAT * 2, {1})
    parted = read({"prompt": chat[:1], "completion": chat[1:], "system": "Be brief."})
    assert parted.without_loss == {2}, "after the system message"
    assert read({"messages": chat}, **{name: None}).without_loss == set(), "a field that is not to be read"
    masked = read({"messages": [CHAT[0], {**CHAT[1], "masked": not off}]})
    assert masked.without_loss == {1}


@pytest.mark.parametrize("name", ["weight", "loss_weight", "train"])
def test_a_row_of_no_weight_has_no_answer(name: str) -> None:
    assert read({"messages": CHAT, name: 0}).answer == []
    assert read({"prompt": "a", "completion": "b", name: False}).answer == []
    assert read({"messages": CHAT, name: 1}).answer == CHAT


def test_system_and_history_come_before_the_question() -> None:
    earlier = [{"role": "user", "content": "First?"}, {"role": "assistant", "content": "one"}]
    system = {"role": "system", "content": "Count."}
    row = {"system": "Count.", "history": [["First?", "one"]], "instruction": "1 + 1", "output": "2"}
    example = read(row)
    assert (example.prompt, example.answer) == ([system], [*earlier, *CHAT])
    assert read({**row, "history": []}).prompt == [system, CHAT[0]]
    assert read({"conversations": CHAT, "system": "Count."}).prompt == [system]
    assert read({"messages": [system, *CHAT], "system": "Count."}).answer == [system, *CHAT], "once"
    assert read({"messages": CHAT, "about": "Count."}, system="about").prompt == [system]
    assert read({**row, "history": None, "system": ""}).prompt == [CHAT[0]]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "images": ["a.png"]},
        {"messages": CHAT, "chosen": CHAT[1], "rejected": CHAT[1]},
        {"prompt": "a", "completion": "b", "label": False},
        {"messages": CHAT, "weight": 0.5},
        {"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]},
        {"messages": [CHAT[0], {**CHAT[1], "train_detail": [{"begin_offset": 0}]}]},
        {"messages": [CHAT[0], {**CHAT[1], "images": ["a.png"]}]},
        {"messages": CHAT, "history": [["a", "b"]]},
        {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
        {"instruction": "a", "output": "b", "history": ["a", "b"]},
        {"messages": [{"role": "system", "content": "x"}, *CHAT], "system": "y"},
        {"prompt": "a", "completion": "b", "system": "y"},
    ],
    ids=lambda row: " ".join(row),
)
def test_a_field_that_changes_what_is_learned_is_refused_until_it_is_left_out(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(row)
    fields = re.findall(r"'data\.fields=\{(.*?)\}'", caught.value.fix)[-1]
    typed = dict(part.split(": ") for part in fields.split(", "))
    assert read(row, **{name: None if own == "null" else own for name, own in typed.items()}).answer  # type: ignore[arg-type]


def test_a_plain_prompt_with_a_system_message_becomes_a_conversation_by_what_is_advised() -> None:
    with pytest.raises(ConfigError, match="instruction: question, output: completion") as caught:
        read({"question": "1 + 1", "completion": "2", "system": "Count."}, prompt="question")
    assert caught.value.fix.startswith("'data.fields={instruction: question, output: completion}'")
    found = read({"question": "1 + 1", "completion": "2", "system": "x"}, instruction="question", output="completion")
    assert [message["role"] for message in (*(found.prompt or []), *found.answer)] == ["system", "user", "assistant"]


def test_other_fields_are_named_if_they_hold_something() -> None:
    assert read({"messages": CHAT, "id": 7, "source": "web", "note": None, "tags": []}).unread == ("id", "source")
    assert read({"prompt": "a", "completion": "b", "label": True}).unread == ("label",)
    assert read({"instruction": "a", "output": "b", "tools": "hammer, saw"}).unread == ("tools",)
    assert read({"messages": CHAT, "tools": []}).unread == ()
    assert read({"messages": [{**CHAT[0], "weight": 1}, CHAT[1]]}).unread == ("weight of user messages",)
    assert read({"messages": CHAT, "images": []}).unread == ()


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "a", "output": None},
        {"prompt": "a", "completion": None, "text": None},
        {"messages": None},
        {"messages": []},
        {"text": None},
    ],
)
def test_a_row_whose_answer_is_null_has_no_answer(row: dict[str, Any]) -> None:
    assert read(row).answer == []


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"instruction": "a", "response": "b", "id": "x"}, "{output: response}"),
        ({"query": "a", "answer": "b"}, "{prompt: query, completion: answer}"),
        ({"instruction": "a", "context": "", "response": "b", "category": "c"}, "{output: response, input: context}"),
        ({"question": "a", "context": "c", "answer": "b"}, "{instruction: question, output: answer, input: context}"),
        ({"prompt": "a", "chosen": "b"}, "{completion: chosen}"),
        ({"dialog": CHAT}, "{messages: dialog}"),
        ({"turns": [{"by": "user", "said": "a"}, {"by": "assistant", "said": "b"}]},
         "{messages: turns, role: by, content: said}"),
        ({"turns": [{"by": "human", "said": "a"}, {"by": "gpt", "said": "b"}]},
         "{conversations: turns, from: by, value: said}"),
        ({"body": "a"}, "{text: body}"),
        ({"messages": [{"speaker": "user", "content": "a"}]}, "{role: speaker}"),
        ({"messages": [{"role": "user", "said": "a"}]}, "{content: said}"),
    ],
)  # fmt: skip
def test_names_of_other_formats_are_mapped_by_what_is_advised(row: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(row)
    assert caught.value.fix == f"'data.fields={advice}'"
    read(row, **dict(pair.split(": ") for pair in advice.strip("{}").split(", ")))


def test_a_question_and_an_answer_alone_need_no_other_names() -> None:
    found = read({"question": "a", "answer": "b"})
    assert (found.prompt, found.answer, found.question) == ("a", "b", "a")
    assert read({"question": "a", "answer": None}).answer == []
    with pytest.raises(ConfigError, match="expected"):
        read({"question": "a", "answer": "b", "difficulty": "c"})


def test_lists_of_both_formats_are_known_by_the_names_in_their_messages() -> None:
    assert read({"conversations": CHAT}).answer == CHAT
    assert read({"messages": [{"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"}]}).answer == CHAT
    assert read({"messages": json.dumps(CHAT)}).answer == CHAT, "also as JSON text, as in a column of CSV"


def test_a_text_may_be_a_list_of_one_part() -> None:
    parts = [{"type": "text", "text": "1 + 1"}]
    assert read({"messages": [{"role": "user", "content": parts}, CHAT[1]]}).answer == CHAT
    with pytest.raises(ConfigError, match="has a part of type image_url, and only text is trained on"):
        read({"messages": [{"role": "user", "content": [*parts, {"type": "image_url"}]}, CHAT[1]]})


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (3, "its tool_calls are not a list of objects"),
        ([3], "its tool_calls are not a list of objects"),
        ([{"function": {}}], "one of its tool_calls names no function"),
        (
            [{"function": {"name": "f", "arguments": "Paris"}}],
            "the arguments of its call of f are text that is no JSON",
        ),
    ],
)
def test_calls_that_are_none_are_refused(calls: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read({"messages": [CHAT[0], {"role": "assistant", "tool_calls": calls}]})
    with pytest.raises(ConfigError, match="its function_call is no call as JSON"):
        read({"conversations": [{"from": "function_call", "value": "weather(Paris)"}]})
