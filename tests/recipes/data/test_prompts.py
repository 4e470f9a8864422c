"""Rows of prompts, as published datasets have them, and what a run of reinforcement learning reads of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preference_rows import Row, assistant, chat, system, user, write

from recipes.data.prompts import Prompts
from recipes.tokenizer.bytes import Bytes


def source_of(folder: Path, rows: list[Row], *, name: str = "rows.jsonl", **settings: Any) -> Prompts:
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
