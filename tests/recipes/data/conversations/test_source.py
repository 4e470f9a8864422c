"""Rows to samples: split by what is asked, counted, cached, and described."""

import json
import logging
import pickle
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from chats import CHATML, make_backend

from recipes.data.conversations import source as source_module
from recipes.data.conversations import store as store_module
from recipes.data.conversations.source import Conversations
from recipes.data.conversations.store import ExampleStore
from recipes.errors import ConfigError
from recipes.numerics.loss import IGNORE_INDEX
from recipes.tokenizer import Tokenizer
from recipes.tokenizer.bpe import Bpe
from recipes.tokenizer.bytes import Bytes


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(num_rows: int = 400) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(num_rows)]


def source_of(folder: Path, rows: list[dict[str, Any]] | None = None, **settings: Any) -> Conversations:
    settings = {
        "path": write(folder / "rows.jsonl", sums() if rows is None else rows),
        "format": None,
        "fields": {},
        "chat_template": "auto",
        "train_on": "answers",
        "packing": True,
        "val_path": None,
        "val_fraction": 0.1,
        "split": "train",
        "tokenizer": Bytes(),
        "seq_len": 32,
        "cache_dir": str(folder / "cache"),
        "image_folder": None,
        "image_token_id": None,
        "image_seq_length": None,
        "transform": None,
    } | settings
    source = Conversations(**settings)
    source.prepare()
    return source


def test_a_tenth_is_held_out_by_what_is_asked_whatever_the_order(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    asked = {source.tokenizer.decode(question) for question, _ in source.questions(1000)}
    assert 20 <= len(asked) <= 60, "a tenth of 400"
    assert len(source.train().examples) + len(source.val().examples) == 400
    others = source_of(tmp_path, list(reversed(sums())))
    assert {others.tokenizer.decode(question) for question, _ in others.questions(1000)} == asked
    # the same question with another answer stays on its side
    doubled = source_of(tmp_path, [*sums(), *({"prompt": row["prompt"], "completion": "?"} for row in sums())])
    assert {doubled.tokenizer.decode(question) for question, _ in doubled.questions(1000)} == asked


def test_a_question_is_in_one_split_whatever_the_system_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": "yes"}]
    rows = [
        {"system": f"prompt {i}", "messages": [{"role": "user", "content": f"<{i % 20}>"}, chat[1]]} for i in range(60)
    ]
    source = source_of(tmp_path, rows, seq_len=256, val_fraction=0.3)
    texts = [
        {re.findall("<[0-9]+>", source.tokenizer.decode(store.tokens(index).tolist()))[0] for index in examples}
        for _, store, examples in source._splits(source._ready()[1])
    ]
    assert (len(texts[0] | texts[1]), texts[0] & texts[1]) == (20, set())
    assert all("system\nprompt" in source.tokenizer.decode(question) for question, _ in source.questions(9)), "shown"
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        other = [{**row, "system": "another"} for row in rows[:20]]
        source_of(tmp_path, rows, seq_len=256, val_path=write(tmp_path / "val.jsonl", other))
    assert "20 of 20 examples of data.val_path begin with a question" in caplog.text


@pytest.mark.parametrize(("val_fraction", "num_val"), [(0.001, 1), (0.899, 2)])
def test_of_two_questions_or_more_no_split_is_empty(
    val_fraction: float, num_val: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = sums(3)
    with caplog.at_level(logging.INFO, "lightning_recipes"):
        source = source_of(tmp_path, rows, val_fraction=val_fraction)
    assert (len(source.train().examples), len(source.val().examples)) == (3 - num_val, num_val)
    assert f"data.val_fraction={val_fraction} of so few questions would leave a split empty" in caplog.text


def test_questions_come_with_their_answers(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    for question, answer in source.questions(10):
        text = source.tokenizer.decode(question)
        assert answer[-1] == source.tokenizer.end_of_text
        assert int(source.tokenizer.decode(answer[:-1])) == 2 * int(text.partition("+")[0])
    assert len(source.questions(10)) == 10


def test_of_a_conversation_the_last_answer_is_asked_for(tmp_path: Path) -> None:
    chat = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    rows = [{"messages": [{"role": role, "content": f"{text}{i}"} for role, text in chat]} for i in range(40)]
    for train_on in ("answers", "all"):
        source = source_of(tmp_path, rows, seq_len=256, val_fraction=0.5, train_on=train_on)
        question, answer = source.questions(1)[0]
        assert source.tokenizer.decode(question).endswith("<|im_start|>assistant\n")
        assert source.tokenizer.decode(question).count("<|im_start|>") == 4
        assert source.tokenizer.decode(answer).startswith("4")


def test_validation_rows_of_their_own_leave_training_whole(tmp_path: Path) -> None:
    source = source_of(tmp_path, val_path=write(tmp_path / "val.jsonl", sums(7)))
    assert (len(source.train().examples), len(source.val().examples)) == (400, 7)


def test_the_line_of_the_log_counts_what_carries_loss(tmp_path: Path) -> None:
    long = [{"prompt": f"{i}=", "completion": "x" * 100, "id": i, "note": ""} for i in range(20)]
    source = source_of(tmp_path, [*sums(80), *long], seq_len=64)
    rows = [source.train()[index] for index in range(len(source.train()))]
    num_targets = sum(int((row["targets"] != IGNORE_INDEX).sum()) for row in rows)
    num_inputs = sum(int(row["num_inputs"]) for row in rows)
    line = source.describe()
    share = f"{num_targets / num_inputs:.0%}"
    assert (
        f"{num_targets:,} of {num_inputs:,} training tokens carry loss ({share}); fields not read: id (20 rows)" in line
    )
    assert "training in" in line
    assert "rows of 64, 9" in line
    [folder] = [path for path in (tmp_path / "cache" / "examples").iterdir() if path.is_dir()]
    assert len(ExampleStore(folder).tokens(99)) > 65, "and what is cut off does not count"


def test_rows_without_an_answer_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    silent = {"messages": [{"role": "user", "content": "hello"}]}
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source = source_of(tmp_path, [silent, *sums(50), silent])
    assert len(source.train().examples) + len(source.val().examples) == 50
    assert "2 rows without an answer to learn are skipped: rows.jsonl:1, rows.jsonl:52" in caplog.text
    with pytest.raises(ConfigError, match="none of its 3 rows has an answer"):
        source_of(tmp_path, [silent] * 3)


def test_what_is_cut_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*sums(200), *({"prompt": f"{i}" * 50, "completion": "x"} for i in range(100, 110))]
    rows += [{"prompt": f"{i}=", "completion": "x" * 50} for i in range(200, 220)]
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source = source_of(tmp_path, rows, val_fraction=0.3)
    counted = [(rows.num_cut, rows.num_without_targets) for rows in (source.train(), source.val())]
    assert tuple(map(sum, zip(*counted, strict=True))) == (20, 10)
    for split, (cut, left_out) in zip(("train", "val"), counted, strict=True):
        are = "is" if left_out == 1 else "are"
        assert f"Of the {split} examples, {cut} are cut to 32 tokens, and {left_out} {are} skipped" in caplog.text


def test_the_second_time_nothing_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = source_of(tmp_path)
    monkeypatch.setattr(store_module, "_encode_all", None)
    again = source_of(tmp_path, seq_len=64, val_fraction=0.2)
    assert again.train().num_inputs < first.train().num_inputs
    monkeypatch.undo()
    assert source_of(tmp_path, train_on="all").fingerprint != first.fingerprint


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for name, processes in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        source = source_of(tmp_path / name, sums(4200), num_processes=processes)
        [folder] = [path for path in (tmp_path / name / "cache" / "examples").iterdir() if path.is_dir()]
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert len(source.train().examples) > 3600
    assert written[0] == written[1]
    assert set(written[0]) == {
        "tokens.bin",
        "marks.bin",
        "notes.bin",
        "images.bin",
        "image_starts.npy",
        "image_records.npy",
        "note_starts.npy",
        "values.npy",
        "starts.npy",
        "questions.npy",
        "targets.npy",
        "places.txt",
        "meta.json",
    }


def test_a_row_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    rows = [*sums(4200), {"prompt": "x"}]  # in the second task of two
    for processes in (1, 2):
        with pytest.raises(ConfigError, match="rows.jsonl:4201: its fields are prompt"):
            source_of(tmp_path, rows, num_processes=processes)
    assert not [path for path in (tmp_path / "cache" / "examples").iterdir() if path.is_dir()]


def test_rows_are_sent_to_loader_processes_without_the_files(tmp_path: Path) -> None:
    rows = source_of(tmp_path, sums(9000)).train()
    rows[0]
    sent = pickle.dumps(rows)
    assert (pickle.loads(sent)[5]["inputs"] == rows[5]["inputs"]).all()
    tokens = (rows._store.folder / "tokens.bin").stat().st_size
    assert len(sent) < 16 * len(rows.examples) + 16 * len(rows) + 10_000, f"and not the {tokens:,} bytes of tokens"


def test_a_bad_batch_is_described_by_file_and_line(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    described = source.describe_sample(0)
    places = [int(document["name"].partition(":")[2]) - 1 for document in described["documents"]]
    for place in places:
        assert f"{place}+{place}={2 * place}" in described["text"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": sums(2)[1:] * 3}, "split is empty: 3 examples with 1 question; type data.val_path=<rows>, or"),
        (
            {"seq_len": 2},
            "begins within 2 tokens; type seq_len=6 or more, and model.max_seq_len=6 or more if it is smaller",
        ),
        (
            {"vocab_size": 200},
            r"model.vocab_size=200: the tokenizer has 257 tokens; type model.vocab_size=257 .*; with model=huggingface,"
            r" model.name=<the model after resize_token_embeddings\(257\) of transformers>",
        ),
        ({"rows": []}, "data.path=/.*/rows.jsonl: it has no rows; type data.path=<rows with answers>$"),
        (
            {"rows": [row | {"weight": 0} for row in sums(3)]},
            "none of its 3 rows has an answer to learn, as the field weight says; type 'data.fields={weight: null}',",
        ),
        (
            {"rows": [{"messages": [{"role": "assistant", "content": "x", "masked": True, "train": 0}]}]},
            "its only row has no answer to learn, as the fields masked, train say; type .data.fields={masked: null, ",
        ),
        ({"tokenizer": {}}, "tokenizer=none: text needs a tokenizer"),
    ],
)
def test_what_cannot_be_trained_on_is_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        source_of(tmp_path, **settings)


def test_what_a_tokenizer_is_trained_on_is_part_of_its_name(tmp_path: Path) -> None:
    rows = [{"text": f"{i} aaaa bbbb " * 20, "alt": f"{i} cccc dddd " * 20} for i in range(50)]
    lengths = []
    for fields in ({"text": "text"}, {"text": "alt"}):
        source = source_of(
            tmp_path, rows, fields=fields, format="text", tokenizer=Bpe(vocab_size=300), val_fraction=0.5, seq_len=512
        )
        lengths.append(len(source.tokenizer.encode("cccc dddd")))
    assert lengths[1] < lengths[0], "the second tokenizer has learned these words"


def test_files_of_two_kinds_of_fields_are_answered_once_for_both(tmp_path: Path) -> None:
    asked = [{"query": f"{i}?", "answer": "x"} for i in range(9)]
    for val, fix in (
        (sums(3), "data.val_path=<rows with the fields of data.path>"),
        ([{"query": "1?", "answer": "y", "prompt": "z"}], "'data.fields={prompt: query, completion: answer}'"),
    ):
        val_path = write(tmp_path / "val.jsonl", val)
        for fields in ({}, {"prompt": "query", "completion": "answer"}):
            if fields and "prompt: query" in fix:
                source_of(tmp_path, asked, val_path=val_path, fields=fields)
                continue
            with pytest.raises(ConfigError, match="and data.fields is for both") as caught:
                source_of(tmp_path, asked, val_path=val_path, fields=fields)
            assert (caught.value.setting, caught.value.fix) == (f"data.val_path={val_path}", fix)


def test_a_template_that_no_row_needs_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source_of(tmp_path, chat_template="chatml")
    assert "data.chat_template=chatml is not used: no row is a conversation" in caplog.text


def test_files_of_other_names_have_other_places(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    assert source.describe_sample(0)["documents"][0]["name"].startswith("rows.jsonl:")
    (tmp_path / "rows.jsonl").rename(tmp_path / "others.jsonl")
    again = source_of(tmp_path, path=str(tmp_path / "others.jsonl"))
    assert again.describe_sample(0)["documents"][0]["name"].startswith("others.jsonl:")


def test_validation_rows_that_are_trained_on_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source_of(tmp_path, val_path=write(tmp_path / "val.jsonl", [*sums(7), {"prompt": "new", "completion": "x"}]))
    assert "7 of 8 examples of data.val_path begin with a question that training examples begin with" in caplog.text


def test_plain_prompts_leave_no_template_behind(tmp_path: Path) -> None:
    assert source_of(tmp_path).tokenizer.chat_template is None
    chat = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "a"}]} for i in range(40)
    ]
    assert "im_start" in (source_of(tmp_path, chat, seq_len=128, val_fraction=0.5).tokenizer.chat_template or "")


def test_a_question_leaves_room_for_its_answer(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i:03}=", "completion": "x" * 27} for i in range(100)]  # 32 tokens with the end, all that fits
    assert len(source_of(tmp_path, rows, val_fraction=0.5).questions(10)) == 10
    longer = [{"prompt": f"{i:04}=", "completion": "x" * 27} for i in range(100)]
    assert source_of(tmp_path, longer, val_fraction=0.5).questions(10) == []


def test_all_rows_of_another_path_are_evaluated_whatever_the_run_validated_on(tmp_path: Path) -> None:
    own = source_of(tmp_path, sums(40), val_path=write(tmp_path / "val.jsonl", sums(3)))
    assert len(own.val().examples) == 3
    own._prepared = None
    own.hold_out_all()
    own.prepare()
    assert len(own.val().examples) == 40
    assert own.describe() == "40 validation examples"


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLING = (
    "{{ tools | tojson }}{%- for m in messages -%}<s>{{ m.role }}{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}</s>{%- endfor -%}"
)


@dataclass
class Chat:
    """A tokenizer with templates."""

    templates: Any

    def make(self, corpus: Any) -> Tokenizer:
        settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": self.templates}
        return Tokenizer(make_backend(), end_of_text=257, settings=settings)


def chats(num_rows: int = 40) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."}], "id": i}
        for i in range(num_rows)
    ]


def text_of(source: Conversations) -> str:
    store = source._ready()[1]["train"]
    return source.tokenizer.decode([token for index in range(len(store)) for token in store.tokens(index).tolist()])


def test_rows_of_a_table_have_the_tokens_of_the_same_rows_as_json(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{name}?"},
                {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
            ],
            "tools": [{"function": {"name": name, "parameters": {field: {"type": "text"} for field in arguments}}}],
        }
        for name, arguments in [("weather", {"city": "Paris"}), ("clock", {"zone": "UTC"})] * 9
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    options: dict[str, Any] = {"tokenizer": Chat(CALLING), "seq_len": 1024, "val_fraction": 0.5, "num_processes": 1}
    as_json = text_of(source_of(tmp_path, rows, **options))
    assert text_of(source_of(tmp_path, path=str(tmp_path / "rows.parquet"), **options)) == as_json
    assert '{"city": "Paris"}' in as_json


def test_what_is_not_read_and_not_shown_is_said_also_of_cached_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only_talk = "{% for m in messages if m.role != 'system' %}{{ m.role + m.content }}{% endfor %}"
    rows = [{**row, "system": "Be brief.", "tags": []} for row in chats()]
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "lightning_recipes"):
            fields = {"system": "system", "history": "histroy"}
            source = source_of(tmp_path, rows, tokenizer=Chat(only_talk), val_fraction=0.5, fields=fields)
        assert source.describe().endswith("; fields not read: id (40 rows)")
        assert "Not trained on: content of system messages (40 rows)" in caplog.text
        assert "the model will not learn to stop" in caplog.text
        assert "data.fields names the field histroy, which no row has" in caplog.text
        assert "writes a date" not in caplog.text


def test_a_date_in_a_template_is_the_same_on_every_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dated = Chat("{{ strftime_now('%d %b %Y') }}" + CHATML)
    with caplog.at_level(logging.INFO, "lightning_recipes"):
        source = source_of(tmp_path, chats(), tokenizer=dated, val_fraction=0.5, seq_len=128)
    assert text_of(source).startswith("26 Jul 2024<|im_start|>")
    assert "The template of the tokenizer writes a date: 2024-07-26 in every example" in caplog.text
    assert "will not learn to stop" not in caplog.text
    monkeypatch.setattr(source_module, "TRAINING_DAY", date(2025, 1, 1))
    other = source_of(tmp_path, chats(), tokenizer=dated, val_fraction=0.5, seq_len=128)
    assert (other.fingerprint != source.fingerprint, "01 Jan 2025" in text_of(other)) == (True, True)


def test_of_several_templates_that_for_tools_is_used_and_all_are_kept(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": CALLING}]
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    rows = [{"messages": [row["messages"][0], called], "tools": TOOLS} for row in chats()]
    options: dict[str, Any] = {"tokenizer": Chat(templates), "seq_len": 1024, "val_fraction": 0.5}
    source = source_of(tmp_path, rows, **options)
    assert text_of(source).count('[{"type": "function", "function": {"name": "weather", "parameters"') == 40
    assert source.tokenizer.chat_templates == {"default": CHATML, "tool_use": CALLING}
    with pytest.raises(
        ConfigError, match="rows.jsonl:1: conversation: the template of the tokenizer does not show a call"
    ):
        source_of(tmp_path, [{"messages": row["messages"]} for row in rows], **options)  # the default, without tools
    with pytest.raises(ConfigError, match="the template of the tokenizer rejects it: it shows no tools|show a call"):
        source_of(tmp_path, rows, **options | {"chat_template": "default"})
