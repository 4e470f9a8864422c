"""Rows of prompts, as published datasets have them, and what a run of reinforcement learning reads of each."""

import csv
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import CHATS, TEMPLATES, chat_tokenizer, make_backend, messages_of
from preference_rows import Given, Row, assistant, chat, system, user, write

from recipes.data.batches import RankShare
from recipes.data.draws import DrawnSamples
from recipes.data.prompts import Prompts, pad_prompts
from recipes.errors import ConfigError
from recipes.numerics.loss import IGNORE_INDEX
from recipes.tokenizer.bytes import Bytes


def source_of(
    folder: Path, rows: list[Row], *, name: str = "rows.jsonl", holds_out: bool = False, **settings: Any
) -> Prompts:
    settings = {
        "path": write(folder / name, rows),
        "fields": {},
        "chat_template": "auto",
        "val_path": None,
        "val_fraction": 0.2,
        "split": "train",
        "tokenizer": Bytes(),
        "seq_len": 256,
        "cache_dir": str(folder / "cache"),
        "num_generations": 2,
        "num_iterations": 1,
        "global_batch_size": 4,
        "max_new_tokens": 32,
        "num_processes": 1,
    } | settings
    source = Prompts(**settings)
    if holds_out:
        source.hold_out_all()
    source.prepare()
    return source


def read(source: Prompts) -> list[tuple[str, str, Any]]:
    """Return prompt, reference and fields of every row, of both splits."""
    found = []
    for split in ("train", "val"):
        dataset: Any = getattr(source, split)()
        samples = [dataset[index] for index in range(len(dataset))]
        rows = source.rows_of([int(sample["row"]) for sample in samples], split)
        texts = [source.tokenizer.decode(sample["prompt"].tolist()) for sample in samples]
        assert [prompt for prompt, _, _ in rows] == texts, "what a reward sees is what the model reads"
        found += rows
    return found


# Layouts of published datasets: the row i, and what its prompt and its reference are.


def gsm8k(i: int) -> tuple[Row, str, str]:
    row = {"question": f"What is {i} plus {i}?", "answer": f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"}
    return row, row["question"], row["answer"]


def hendrycks_math(i: int) -> tuple[Row, str, str]:
    row = {"problem": f"Find ${i}x$.", "level": "Level 1", "type": "Algebra", "solution": f"$\\boxed{{{i}}}$"}
    return row, row["problem"], row["solution"]


def numina(i: int) -> tuple[Row, str, str]:
    row = {"source": "olympiads", "problem": f"p{i}", "solution": "Since so, 7.", "answer": str(i)}
    return row, f"p{i}", str(i)


def trl_messages(i: int) -> tuple[Row, str, str]:
    prompt = [system("Think first."), user(f"q{i}")]
    return {"prompt": prompt, "solution": f"s{i}"}, chat(*prompt), f"s{i}"


def trl_prompt_only(i: int) -> tuple[Row, str, str]:
    return {"prompt": f"SUBREDDIT: r/{i}\n\nTL;DR:"}, f"SUBREDDIT: r/{i}\n\nTL;DR:", ""


def verl(i: int) -> tuple[Row, str, str]:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [user(f"q{i}")],
        "ability": "math",
        "reward_model": {"ground_truth": str(i), "style": "rule"},
        "extra_info": {"index": i, "split": "train"},
    }
    return row, chat(user(f"q{i}")), str(i)


def open_instruct(i: int) -> tuple[Row, str, str]:
    row = {"messages": [user(f"q{i}")], "ground_truth": [str(i)], "dataset": ["gsm8k"]}
    return row, chat(user(f"q{i}")), str(i)


def fine_tuning(i: int) -> tuple[Row, str, str]:
    messages = [user(f"hi {i}"), assistant("hello"), user(f"q{i}"), assistant(f"a{i}")]
    given = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|endoftext|>\n" for each in messages[:2])
    return {"messages": messages}, given + chat(user(f"q{i}")), f"a{i}"


def sharegpt(i: int) -> tuple[Row, str, str]:
    turns = [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}]
    return {"conversations": turns}, chat(user(f"q{i}")), f"a{i}"


def alpaca(i: int) -> tuple[Row, str, str]:
    row = {"instruction": "Add them.", "input": f"{i}, {i}", "output": str(2 * i)}
    return row, chat(user(f"Add them.\n\n{i}, {i}")), str(2 * i)


def system_beside_text(i: int) -> tuple[Row, str, str]:
    row = {"system": "Be brief." if i % 2 else "", "question": f"q{i}", "target": i}
    return row, chat(*([system("Be brief.")] if i % 2 else []), user(f"q{i}")), str(i)


LAYOUTS = [
    gsm8k,
    hendrycks_math,
    numina,
    trl_messages,
    trl_prompt_only,
    verl,
    open_instruct,
    fine_tuning,
    sharegpt,
    alpaca,
    system_beside_text,
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_give_prompt_reference_and_all_fields(
    layout: Callable[[int], tuple[Row, str, str]], suffix: str, tmp_path: Path
) -> None:
    made = [layout(i) for i in range(12)]
    found = read(source_of(tmp_path, [row for row, *_ in made], name=f"rows{suffix}"))
    expected = sorted(((prompt, reference, row) for row, prompt, reference in made), key=str)
    assert sorted(found, key=str) == expected


def texts(num_rows: int = 40) -> list[Row]:
    return [{"prompt": f"{i}?", "reference": f"r{i}", "difficulty": i} for i in range(num_rows)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_the_tokens_of_transformers_with_the_prompt_for_an_answer(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=make_backend(), **special)
    asked = [messages_of(each)[:-1] for each in CHATS]
    tokenizer: Any = Given(chat_tokenizer(TEMPLATES[name]))
    source = source_of(
        tmp_path, [{"prompt": each} for each in asked], tokenizer=tokenizer, global_batch_size=2, seq_len=512
    )
    found = [dataset[0]["prompt"].tolist() for dataset in (source.train(), source.val())]
    given = {"chat_template": TEMPLATES[name], "add_generation_prompt": True, "return_dict": False}
    expected = [theirs.apply_chat_template(each, **given) for each in asked]
    assert sorted(found) == sorted(expected)


def test_a_text_begins_with_the_first_tokens_of_the_tokenizer_and_special_tokens_in_it_are_text(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    rows = [{"prompt": f"{i} </s>"} for i in range(12)]
    given: Any = Given(tokenizer)
    prompt = source_of(tmp_path, rows, tokenizer=given).train()[0]["prompt"].tolist()
    assert prompt[:1] == tokenizer.first_tokens
    assert not tokenizer.special_ids & {*prompt[1:]}


def test_columns_of_text_hold_messages_and_objects_as_json(tmp_path: Path) -> None:
    """The layout of verl, written as CSV."""
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["prompt", "reward_model"])
        for i in range(12):
            rows.writerow([json.dumps([user(f"q{i}")]), json.dumps({"ground_truth": f"{i},0", "style": "rule"})])
    found = read(source_of(tmp_path, [], path=str(path), name="none.jsonl"))
    assert {(prompt, reference) for prompt, reference, _ in found} == {
        (chat(user(f"q{i}")), f"{i},0") for i in range(12)
    }


REFERENCES: list[tuple[Any, str]] = [
    (None, ""),
    ("", ""),
    (" as it is ", " as it is "),
    (72, "72"),
    (0.5, "0.5"),
    (True, "true"),
    (["72"], "72"),
    (["7", "8"], '["7", "8"]'),
    ({"tests": ["ä"]}, '{"tests": ["ä"]}'),
    ([assistant("yes")], "yes"),
]


@pytest.mark.parametrize(("value", "text"), REFERENCES)
def test_a_reference_is_a_text_whatever_the_row_holds(value: Any, text: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "ground_truth": value} for i in range(8)]
    assert {reference for _, reference, _ in read(source_of(tmp_path, rows))} == {text}


MAPPED: list[tuple[dict[str, str | None], str, str]] = [
    ({}, "q3", "a3"),
    ({"prompt": "text"}, "t3", "a3"),
    ({"reference": "extra.answer"}, "q3", "x3"),
    ({"reference": None}, "q3", ""),
    ({"answer": None}, "q3", "s3"),
    ({"instruction": "question"}, chat(user("q3")), "a3"),
    ({"instruction": "question", "input": "text"}, chat(user("q3\n\nt3")), "a3"),
    ({"system": "text"}, chat(system("t3"), user("q3")), "a3"),
]


@pytest.mark.parametrize(("fields", "prompt", "reference"), MAPPED)
def test_fields_are_named_by_data_fields(fields: Any, prompt: str, reference: str, tmp_path: Path) -> None:
    rows = [
        {"question": f"q{i}", "text": f"t{i}", "answer": f"a{i}", "solution": f"s{i}", "extra": {"answer": f"x{i}"}}
        for i in range(8)
    ]
    found = {given: (expected, row) for given, expected, row in read(source_of(tmp_path, rows, fields=fields))}
    expected, row = found[prompt]
    assert expected == reference
    assert row == {name: value for name, value in rows[3].items() if fields.get(name, name) is not None}


def test_what_json_cannot_hold_is_not_given_to_rewards_and_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "scan": b"\xff\x00"} for i in range(8)]
    source = source_of(tmp_path, rows, name="rows.parquet")
    assert all(row == {"prompt": prompt} for prompt, _, row in read(source))
    assert source.describe() == (
        "6 training and 2 validation prompts of 2 to 2 tokens, 2 on average; none with a reference;"
        " fields not read: scan (8 rows)"
    )


# What cannot be read, and what to type.

WRONG: list[tuple[Row, dict[str, str | None], str]] = [
    ({"text": "Once"}, {}, "its fields are text, .*; type 'data.fields={prompt: text}'"),
    ({"text": "Once", "id": 1}, {"reference": "id"}, "type 'data.fields={reference: id, prompt: text}'"),
    ({"turns": [user("hi")]}, {}, "type 'data.fields={prompt: turns}'"),
    ({"target": 98, "nums": [4, 9]}, {}, "type 'data.fields={prompt: <field of the prompt>}', or rows with one"),
    (
        {"prompt": "x", "chosen": "a", "rejected": "b"},
        {},
        "type recipe=dpo, .* 'data.fields={chosen: null, rejected: null",
    ),
    ({"prompt": "x", "completion": "a", "label": False}, {}, "type recipe=kto, .* 'data.fields={completion: null"),
    (
        {"question": "x", "problem": "y"},
        {},
        "its question and problem may each be .*; type 'data.fields={prompt: problem}'",
    ),
    (
        {"question": "x", "context": "y"},
        {},
        "may be about its context, .* 'data.fields={instruction: question, input",
    ),
    (
        {"question": "x", "choices": ["a", "b"]},
        {},
        "type rows whose prompt holds both, or 'data.fields={prompt: question}'",
    ),
    ({"question": "x"}, {"prompt": "task"}, "it has no field task; .*; type 'data.fields={prompt: question}'"),
    (
        {"prompt": [user("x"), assistant("y")]},
        {},
        "ends with a message of the assistant, .*'data.fields={messages: prompt}'",
    ),
    ({"messages": "x"}, {}, "its messages is text, .*; type 'data.fields={prompt: messages}'"),
    ({"prompt": "[{'role': 'user', 'content': 'x'}]"}, {}, "shows messages as Python does"),
    ({"prompt": 3}, {}, "its prompt is not text but a number; type a text as prompt there"),
    ({"prompt": [{"role": "tutor", "content": "x"}]}, {}, "a message has role .tutor., expected one of"),
    (
        {"prompt": "x", "images": ["a.png"]},
        {},
        "it has images, and only text is trained on; type 'data.fields={images: null",
    ),
]


@pytest.mark.parametrize(("row", "fields", "message"), WRONG)
def test_a_row_that_cannot_be_read_says_what_to_type(
    row: Row, fields: dict[str, str | None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        source_of(tmp_path, [row], fields=fields)
    assert caught.value.setting.startswith("rows.jsonl:1")


@pytest.mark.parametrize(
    ("fields", "typed"),
    [
        ({"answer": "key"}, "data.fields.answer=key: .*; type 'data.fields={reference: key}'"),
        ({"question": "task"}, "data.fields.question=task: .*; type 'data.fields={prompt: task}'"),
        ({"reference": "key"}, "data.fields.reference=key: no row has a reference there"),
    ],
)
def test_names_that_map_nothing_are_refused(fields: dict[str, str | None], typed: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=typed):
        source_of(tmp_path, texts(), fields=fields)


def test_empty_prompts_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty: list[Any] = ["", " \n", None, [], [user(" ")]]
    with caplog.at_level(logging.WARNING):
        source = source_of(tmp_path, [*texts(8), *({"prompt": each} for each in empty)])
    assert len(source.train()) + len(source.val()) == 8
    assert (
        "5 rows are left out, because the prompt is empty: rows.jsonl:9, rows.jsonl:10, rows.jsonl:11, …" in caplog.text
    )
    with pytest.raises(ConfigError, match=r"it has no row to learn from \(5 rows: the prompt is empty\)"):
        source_of(tmp_path, [{"prompt": each} for each in empty], name="empty.jsonl")
    with pytest.raises(ConfigError, match="it has no rows"):
        source_of(tmp_path, [], name="nothing.jsonl")


def test_prompts_that_leave_no_room_for_a_completion_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "x" * length, "reference": "y" * 90} for length in range(1, 61)]
    with caplog.at_level(logging.WARNING):
        source = source_of(
            tmp_path, rows, seq_len=64, max_new_tokens=14, val_path=write(tmp_path / "val.jsonl", texts(4))
        )
    assert sorted(len(source.train()[index]["prompt"]) for index in range(len(source.train()))) == [*range(1, 51)]
    assert "Of the 60 train prompts, 10 are left out: longer than seq_len - rollout.max_new_tokens = 50" in caplog.text
    assert "the longest of 60. seq_len=74, " in caplog.text
    with pytest.raises(
        ConfigError, match="no prompt of the train split fits into the 1 tokens .*; type seq_len=65 or more"
    ):
        source_of(
            tmp_path, rows[1:], name="long.jsonl", seq_len=64, max_new_tokens=63, val_path=str(tmp_path / "val.jsonl")
        )


def test_a_step_has_no_prompt_twice(tmp_path: Path) -> None:
    wanted = r"the train split has 3 prompts, and a step reads 4 .*; type global_batch_size=6 or less"
    val = write(tmp_path / "val.jsonl", texts(4))
    with pytest.raises(ConfigError, match=wanted):
        source_of(tmp_path, texts(3), global_batch_size=8, val_path=val)
    assert len(source_of(tmp_path, texts(4), global_batch_size=8, val_path=val).train()) == 4


def test_plain_text_for_a_model_that_chats_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer: Any = Given(chat_tokenizer(TEMPLATES["chatml"]))
    with caplog.at_level(logging.WARNING):
        source_of(tmp_path, texts(), tokenizer=tokenizer)
        assert "'data.fields={instruction: <field of the prompt>}', which makes a message of the user" in caplog.text
        caplog.clear()
        mapped = source_of(tmp_path, texts(), tokenizer=tokenizer, fields={"instruction": "prompt"})
    assert not caplog.records
    assert read(mapped)[0][0].endswith("?<|im_end|>\n<|im_start|>assistant\n")


# Samples, their order, and what stands beside them.


def test_equal_questions_are_in_one_split_and_all_is_held_out_on_request(tmp_path: Path) -> None:
    rows = [{"prompt": [system(f"s{i % 5}"), user(f"q{i // 5}")]} for i in range(100)]
    source = source_of(tmp_path, rows)
    asked = []
    for split in ("train", "val"):
        dataset: Any = getattr(source, split)()
        found = source.rows_of(dataset.examples.tolist(), split)
        asked.append({row["prompt"][1]["content"] for _, _, row in found})
    assert len(source.train()) + len(source.val()) == 100
    assert not asked[0] & asked[1]
    held_out = source_of(tmp_path, rows, holds_out=True)
    assert len(held_out.val()) == 100
    assert held_out.describe().startswith("100 validation prompts of ")


def test_the_stream_reads_a_prompt_for_each_completion_and_a_batch_for_each_iteration(tmp_path: Path) -> None:
    source = source_of(tmp_path, texts(), num_generations=2, global_batch_size=8, num_iterations=3)
    dataset: Any = source.train()
    stream = DrawnSamples(dataset, seed=5)
    places = dataset.make_order(5).places(np.arange(dataset.count_new()))
    samples = [stream[tuple(place)] for place in places.tolist()]
    rows = np.array([int(sample["row"]) for sample in samples])
    seeds = np.array([int(sample["seed"]) for sample in samples])
    steps, seeds_of_steps = (
        rows[: len(rows) // 24 * 24].reshape(-1, 3, 8),
        seeds[: len(rows) // 24 * 24].reshape(-1, 3, 8),
    )
    assert (steps == steps[:, :1]).all(), "three steps on one rollout"
    assert (seeds_of_steps == seeds_of_steps[:, :1]).all()
    first = steps[:, 0].reshape(-1, 2)
    assert (first[:, 0] == first[:, 1]).all(), "a group is one prompt"
    assert len(np.unique(first[:, 0])) == len(first), "and a prompt one group in an epoch"
    assert len(np.unique(seeds_of_steps[:, 0])) == seeds_of_steps[:, 0].size, "each completion has its own seed"
    assert dataset.num_reads == 2 * 3
    assert dataset.count_new() == len(dataset) * 2 * 3
    assert dataset.count_epochs(dataset.count_new()) == {"the prompts": 1.0}


def test_a_batch_is_padded_at_the_end_and_has_lengths_rows_and_seeds(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"prompt": "x" * length} for length in range(1, 13)])
    dataset: Any = source.train()
    samples = [dataset[index] for index in range(4)]
    assert all(sample[name].dtype == torch.int64 for sample in samples for name in ("prompt", "row", "seed"))
    batch = source.collate(samples)
    lengths = [len(sample["prompt"]) for sample in samples]
    assert batch["num_prompt"].tolist() == lengths
    assert batch["prompt"].shape == (4, max(lengths))
    for row, sample in zip(batch["prompt"], samples, strict=True):
        assert row.tolist() == sample["prompt"].tolist() + [0] * (max(lengths) - len(sample["prompt"]))
    assert batch["row"].tolist() == [int(sample["row"]) for sample in samples]
    assert (batch["targets"] == IGNORE_INDEX).all()
    assert batch["targets"].shape == batch["inputs"].shape == batch["prompt"].shape
    assert dataset[-1]["prompt"].tolist() == dataset[len(dataset) - 1]["prompt"].tolist()
    assert torch.equal(dataset[-1]["seed"], dataset[len(dataset) - 1]["seed"])
    with pytest.raises(IndexError, match="prompt 99 of"):
        dataset[99]


def test_ranks_fill_up_a_validation_with_rows_that_are_none(tmp_path: Path) -> None:
    source = source_of(tmp_path, texts(), val_path=write(tmp_path / "val.jsonl", texts(3)))
    shares = [RankShare(source.val(), rank=rank, world_size=2) for rank in range(2)]
    rows = [int(share[index]["row"]) for index in range(2) for share in shares]
    assert rows == [0, 1, 2, -1]
    found = source.rows_of(rows, "val")
    assert [row.get("difficulty") for _, _, row in found] == [0, 1, 2, None]
    assert found[-1] == ("", "", {})


def test_rows_and_questions_need_the_file_no_more(tmp_path: Path) -> None:
    source = source_of(tmp_path, texts(200), max_new_tokens=200)
    (tmp_path / "rows.jsonl").unlink()
    decode, questions = source.tokenizer.decode, source.questions(7)
    rows = source.question_rows(7)
    assert len(questions) == len(rows) == 7
    for (prompt, answer), row in zip(questions, rows, strict=True):
        assert decode(prompt) == row["prompt"]
        assert decode(answer) == f"{row['reference']}<|endoftext|>"
    described = source.describe_sample(3)
    assert described["text"] == decode(source.train()[3]["prompt"].tolist())
    assert described["documents"][0]["name"] == f"rows.jsonl:{int(described['text'][:-1]) + 1}"
    again = pickle.loads(pickle.dumps(source.train()))
    assert again[5]["prompt"].tolist() == source.train()[5]["prompt"].tolist()
    assert len(pickle.dumps(source.train())) < 20_000, "a loader process opens the files itself"


def test_the_fingerprint_says_which_sample_is_where(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"num_generations": 4},
        {"num_iterations": 2},
        {"num_iterations": 2, "global_batch_size": 8},
        {"max_new_tokens": 8},
        {"fields": {"reference": None}},
    ]
    found = [source_of(tmp_path, texts(), **change) for change in changes]
    assert len({source.fingerprint for source in found}) == len(changes)
    assert source_of(tmp_path, texts(), global_batch_size=8).fingerprint == found[0].fingerprint
    assert found[1].val_fingerprint == found[0].val_fingerprint


def test_a_batch_of_one_prompt_has_no_padding() -> None:
    prompt = torch.tensor([5, 6])
    sample = {"prompt": prompt, "inputs": prompt, "row": torch.tensor(3), "seed": torch.tensor(7)}
    assert {name: value.tolist() for name, value in pad_prompts([sample]).items()} == {
        "prompt": [[5, 6]],
        "num_prompt": [2],
        "row": [3],
        "seed": [7],
        "inputs": [[5, 6]],
        "targets": [[IGNORE_INDEX, IGNORE_INDEX]],
    }


def test_prompts_without_a_rollout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="data=prompts: nothing completes these prompts: .*; type recipe=grpo, or data="
    ):
        source_of(tmp_path, texts(), num_generations=None)
