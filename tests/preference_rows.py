"""Rows of preferences in files, sources that read them, and what is learned of each."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.data.preferences import PreferenceRows, Preferences
from recipes.numerics.loss import IGNORE_INDEX
from recipes.tokenizer import Tokenizer
from recipes.tokenizer.bytes import Bytes

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def system(text: str) -> Row:
    return {"role": "system", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


def texts(num_rows: int = 40) -> list[Row]:
    return [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": "no"} for i in range(num_rows)]


def labelled(num_rows: int = 40) -> list[Row]:
    return [{"prompt": f"{i}?", "completion": f"<{i}>", "label": i % 3 == 0} for i in range(num_rows)]


class Given:
    """Config of a tokenizer that is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def make(self, corpus: Any) -> Tokenizer:
        return self._tokenizer


def write(path: Path, rows: list[Row]) -> str:
    if path.suffix == ".parquet":
        pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source_of(folder: Path, rows: list[Row], *, name: str = "rows.jsonl", **settings: Any) -> Preferences:
    settings = {
        "path": write(folder / name, rows),
        "kind": "pairs",
        "fields": {},
        "packing": False,
        "chat_template": "auto",
        "val_path": None,
        "val_fraction": 0.1,
        "split": "train",
        "tokenizer": Bytes(),
        "seq_len": 256,
        "cache_dir": str(folder / "cache"),
        "num_processes": 1,
    } | settings
    source = Preferences(**settings)
    source.prepare()
    return source


def rows_of(source: Preferences) -> PreferenceRows:
    rows = source.train()
    assert isinstance(rows, PreferenceRows)
    return rows


def samples_of(source: Preferences) -> list[list[tuple[str, str]]]:
    """Return prompt and answer of each row of each training sample, as text."""
    decode = source.tokenizer.decode
    found = []
    for index in range(len(source.train())):
        sample, answers = source.train()[index], []
        for inputs, targets, num_inputs in zip(sample["inputs"], sample["targets"], sample["num_inputs"], strict=True):
            is_target = targets != IGNORE_INDEX
            num_given = int(is_target.int().argmax()) + 1
            num_learned = int(is_target.sum())  # what a template writes after the end of a turn is not learned
            assert bool(is_target[num_given - 1 :][:num_learned].all()), "an answer is one piece"
            assert num_given - 1 + num_learned <= num_inputs
            answers.append((decode(inputs[:num_given].tolist()), decode(targets[is_target].tolist())))
        found.append(answers)
    return found


def chat(*messages: Row) -> str:
    """Return the text of messages by the tokenizer of bytes, ready for an answer."""
    shown = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|endoftext|>\n" for each in messages)
    return f"{shown}<|im_start|>assistant\n"


def learned_of(source: Preferences) -> set[tuple[str, ...]]:
    """Return the text of each row of the training samples that carries loss, in its parts."""
    found, decode = set(), source.tokenizer.decode
    for index in range(len(source.train())):
        for targets in source.train()[index]["targets"]:
            runs = np.split(targets.numpy(), np.flatnonzero(np.diff(targets.numpy() != IGNORE_INDEX)) + 1)
            found.add(tuple(decode(run.tolist()) for run in runs if run[0] != IGNORE_INDEX))
    return found
