"""Rows of examples by hand: inputs, shifted targets, positions; nothing is predicted across examples."""

from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.data.conversations.chat_template import ChatTemplate
from recipes.data.conversations.conversation import Reader
from recipes.data.conversations.loss_mask import ExampleTokenizer
from recipes.data.conversations.rows import ExampleRows, pad_rows
from recipes.data.conversations.store import ExampleStore, cached_examples
from recipes.data.read_rows import Row
from recipes.tokenizer.bytes import byte_tokenizer

EXAMPLES = [("ab", "cd"), ("e", "f"), ("ghijkl", "m"), ("n", "opqrstuv")]  # of 5, 3, 8 and 10 tokens with the end
END = 256


@pytest.fixture
def store(tmp_path: Path) -> ExampleStore:
    rows = [Row(f"a.jsonl:{i + 1}", {"prompt": p, "completion": c}) for i, (p, c) in enumerate(EXAMPLES)]
    return cached_examples(
        rows,
        setting="data.path=a.jsonl",
        reader=Reader(format=None, fields={}),
        tokenizer=ExampleTokenizer(byte_tokenizer(), ChatTemplate("", ""), train_on="answers"),
        vocab_size=257,
        key="",
        cache_dir=tmp_path,
        num_processes=1,
    )


def rows_of(store: ExampleStore, seq_len: int, *, packs: bool) -> ExampleRows:
    return ExampleRows(store, np.arange(len(store)), seq_len=seq_len, packs=packs)


def spell(tokens: torch.Tensor) -> str:
    """Return tokens as text: `.` for padding, `|` for the end of a text, `_` for what carries no loss."""
    return "".join({-100: "_", 0: ".", END: "|"}.get(token, chr(token % 256)) for token in tokens.tolist())


def test_a_packed_row_holds_examples_their_shifted_answers_and_their_positions(store: ExampleStore) -> None:
    rows = rows_of(store, 12, packs=True)
    # inputs of 4, 2, 7 and 9 tokens: 9 + 2, then 7 + 4
    assert [rows.examples_of(index) for index in range(len(rows))] == [[1, 3], [0, 2]]
    first, second = rows[0], rows[1]
    assert spell(first["inputs"]) == "efnopqrstuv."
    assert spell(first["targets"]) == "f|opqrstuv|_"
    assert first["positions"].tolist() == [0, 1, *range(9), 0], "padding begins a document of its own"
    assert spell(second["inputs"]) == "abcdghijklm."
    assert spell(second["targets"]) == "_cd|_____m|_"
    assert second["positions"].tolist() == [*range(4), *range(7), 0]


def test_a_row_of_one_example_has_its_length_and_no_positions(store: ExampleStore) -> None:
    rows = rows_of(store, 12, packs=False)
    assert len(rows) == 4
    assert spell(rows[1]["inputs"]) == "ef"
    assert set(rows[1]) == {"inputs", "targets"}


def test_a_batch_of_such_rows_is_padded_to_a_multiple_of_64_without_targets(store: ExampleStore) -> None:
    rows = rows_of(store, 12, packs=False)
    batch = pad_rows([rows[1], rows[2]], seq_len=100)
    assert batch["inputs"].shape == batch["targets"].shape == (2, 64)
    assert spell(batch["inputs"][0]) == "ef" + "." * 62
    assert spell(batch["targets"][1]) == "_____m|" + "_" * 57


def test_a_long_example_is_cut_and_left_out_if_its_answer_begins_later(store: ExampleStore) -> None:
    rows = rows_of(store, 5, packs=False)
    assert (rows.num_cut, rows.num_without_targets) == (1, 1), "`nopqrstuv` is cut, the answer m is the seventh target"
    assert [spell(rows[index]["targets"]) for index in range(len(rows))] == ["_cd|", "f|", "opqrs"]


def test_every_answer_is_a_target_once_however_examples_are_packed(store: ExampleStore) -> None:
    for seq_len in (9, 12, 100):
        for packs in (True, False):
            rows = rows_of(store, seq_len, packs=packs)
            targets = "".join(sorted("".join(spell(rows[i]["targets"]).replace("_", "") for i in range(len(rows)))))
            assert targets == "".join(sorted("cd|f|m|opqrstuv|"))


def test_examples_keep_their_places_and_questions(store: ExampleStore) -> None:
    assert [store.place(index) for index in range(4)] == [f"a.jsonl:{index + 1}" for index in range(4)]
    assert len(set(store.questions.tolist())) == 4
    assert store.num_targets.tolist() == [3, 2, 2, 9]


def test_a_row_beyond_the_last_is_refused(store: ExampleStore) -> None:
    with pytest.raises(IndexError, match="row 4 of 4"):
        rows_of(store, 12, packs=False)[4]


def test_rows_are_not_padded_beyond_what_the_model_reads(store: ExampleStore) -> None:
    rows = rows_of(store, 12, packs=False)
    assert pad_rows([rows[1], rows[2]], seq_len=12)["inputs"].shape == (2, 12)


@pytest.mark.parametrize("packs", [True, False])
def test_inputs_are_counted_without_padding_and_without_reading_rows(packs: bool, store: ExampleStore) -> None:
    rows = rows_of(store, 12, packs=packs)
    counted = rows.count_inputs(np.arange(len(rows))).tolist()
    assert counted == ([11, 11] if packs else [4, 2, 7, 9])
    samples = [rows[index] for index in range(len(rows))]
    assert pad_rows(samples, seq_len=100)["num_inputs"].tolist() == counted
    if packs:
        assert [int(sample["num_inputs"]) for sample in samples] == counted
