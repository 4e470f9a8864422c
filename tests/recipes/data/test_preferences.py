"""Rows of preferences, as published datasets have them, and what becomes of each pair."""

import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import TEMPLATES, chat_tokenizer
from preference_rows import (
    Given,
    Row,
    assistant,
    chat,
    labelled,
    learned_of,
    rows_of,
    samples_of,
    source_of,
    system,
    texts,
    user,
    write,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from recipes.data.batches import RankShare
from recipes.data.preferences import pad_samples
from recipes.errors import ConfigError
from recipes.loss.preference import DPO, KTO, BradleyTerry
from recipes.numerics.loss import IGNORE_INDEX
from recipes.tokenizer import NUM_BYTES, Tokenizer, byte_alphabet

# Layouts of published datasets: the row i, and what its prompt and its answers are.

TURNS = "\n\nHuman: What is {i}?\n\nAssistant: A number.\n\nHuman: And its double?\n\nAssistant:"


def ultrafeedback_binarized(i: int) -> tuple[Row, str, str, str]:
    question = f"What is {i} plus {i}?"
    chosen, rejected = ([user(question), assistant(text)] for text in (f"It is {2 * i}.", "I think 7."))
    scores = {"prompt_id": f"{i:08x}", "messages": chosen, "score_chosen": 8.5, "score_rejected": 3.0}
    row = {"prompt": question, "chosen": chosen, "rejected": rejected, **scores}
    return row, chat(user(question)), f"It is {2 * i}.<|endoftext|>", "I think 7.<|endoftext|>"


def hh_rlhf(i: int) -> tuple[Row, str, str, str]:
    given = TURNS.format(i=i)
    row = {"chosen": f"{given} It is {2 * i}.", "rejected": f"{given} It differs."}
    return row, given, f" It is {2 * i}.<|endoftext|>", " It differs.<|endoftext|>"


def orca_dpo_pairs(i: int) -> tuple[Row, str, str, str]:
    first = "You are helpful." if i % 2 else ""
    row = {"system": first, "question": f"Count to {i}", "chosen": f"1 to {i}", "rejected": "no"}
    messages = [*([system(first)] if first else []), user(f"Count to {i}")]
    return row, chat(*messages), f"1 to {i}<|endoftext|>", "no<|endoftext|>"


def dpo_mix_7k(i: int) -> tuple[Row, str, str, str]:
    shared = [user(f"hi {i}"), assistant("hello"), user("Name one")]
    ratings = {"dataset": "some", "chosen_rating": 5.0, "rejected_rating": 2.0}
    row = {"chosen": [*shared, assistant(f"A{i}")], "rejected": [*shared, assistant("none")], **ratings}
    given = f"<|im_start|>user\nhi {i}<|endoftext|>\n<|im_start|>assistant\nhello<|endoftext|>\n" + chat(
        user("Name one")
    )
    return row, given, f"A{i}<|endoftext|>", "none<|endoftext|>"


def explicit_prompt(i: int) -> tuple[Row, str, str, str]:
    prompt = [system("Be brief"), user(f"q{i}")]
    row = {"prompt": prompt, "chosen": [assistant("yes")], "rejected": [assistant("no")]}
    return row, chat(*prompt), "yes<|endoftext|>", "no<|endoftext|>"


def prompt_after_a_system_message(i: int) -> tuple[Row, str, str, str]:
    shared = [system("Be brief"), user(f"q{i}")]
    row = {"prompt": f"q{i} ", "chosen": [*shared, assistant("yes")], "rejected": [*shared, assistant("no")]}
    return row, chat(*shared), "yes<|endoftext|>", "no<|endoftext|>"


def longer_prompt(i: int) -> tuple[Row, str, str, str]:
    prompt = [system("Be brief"), user(f"q{i}")]
    row = {"prompt": prompt, "chosen": [prompt[1], assistant("yes")], "rejected": [prompt[1], assistant("no")]}
    return row, chat(*prompt), "yes<|endoftext|>", "no<|endoftext|>"


def plain_text(i: int) -> tuple[Row, str, str, str]:
    row = {"prompt": f"The sky {i} is", "chosen": " blue.", "rejected": " green."}
    return row, f"The sky {i} is", " blue.<|endoftext|>", " green.<|endoftext|>"


LAYOUTS = [
    ultrafeedback_binarized,
    hh_rlhf,
    orca_dpo_pairs,
    dpo_mix_7k,
    explicit_prompt,
    prompt_after_a_system_message,
    longer_prompt,
    plain_text,
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_give_prompt_and_both_answers(
    layout: Callable[[int], tuple[Row, str, str, str]], suffix: str, tmp_path: Path
) -> None:
    made = [layout(i) for i in range(12)]
    source = source_of(tmp_path, [row for row, *_ in made], name=f"rows{suffix}", val_fraction=0.2)
    expected = {(prompt, chosen, rejected) for _, prompt, chosen, rejected in made}
    found = samples_of(source)
    assert all(pair[0][0] == pair[1][0] for pair in found), "one prompt for both"
    assert {(pair[0][0], pair[0][1], pair[1][1]) for pair in found} <= expected
    assert len(found) + len(source.val()) == 12
    assert "question" not in source.describe(), "it is read"


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_turns_of_sharegpt_are_read(suffix: str, as_list: bool, tmp_path: Path) -> None:
    """The layout of LLaMA-Factory for rankings: a conversation, and a message of each kind beside it."""

    def answer(text: str) -> Any:
        message = {"from": "gpt", "value": text}
        return [message] if as_list else message

    rows = [
        {"conversations": [{"from": "human", "value": f"{i}?"}], "chosen": answer("yes"), "rejected": answer("no")}
        for i in range(12)
    ]
    source = source_of(tmp_path, rows, name=f"rows{suffix}", fields={"prompt": "conversations"}, val_fraction=0.2)
    asked = {pair[0][0] for pair in samples_of(source)}
    assert asked <= {chat(user(f"{i}?")) for i in range(12)}
    assert {(pair[0][1], pair[1][1]) for pair in samples_of(source)} == {("yes<|endoftext|>", "no<|endoftext|>")}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_unpaired_rows_have_a_label(is_chat: bool, suffix: str, tmp_path: Path) -> None:
    """The layout of trl-lib/kto-mix-14k, and of plain texts."""
    rows: list[Row] = labelled(30)
    if is_chat:
        rows = [row | {"prompt": [user(row["prompt"])], "completion": [assistant(row["completion"])]} for row in rows]
    source = source_of(tmp_path, rows, name=f"rows{suffix}", kind="answers", val_fraction=0.2)
    train = rows_of(source)
    shown = [answers[0][1] for answers in samples_of(source)]
    numbers = [int(text[1 : text.index(">")]) for text in shown]
    assert [int(train[i]["label"]) for i in range(len(train))] == [number % 3 == 0 for number in numbers]
    assert 0 < len(source.val()) < 30


def test_a_conversation_with_a_label_is_an_answer_after_its_prompt(tmp_path: Path) -> None:
    rows = [{"messages": [user(f"{i}?"), assistant(f"<{i}>")], "kto_tag": i % 2 == 0} for i in range(20)]
    source = source_of(tmp_path, rows, kind="answers", fields={"completion": "messages", "label": "kto_tag"})
    prompt, answer = samples_of(source)[0][0]
    assert prompt == chat(user(f"{answer[1 : answer.index('>')]}?"))


def test_of_pairs_kto_takes_a_good_and_a_bad_answer(tmp_path: Path) -> None:
    source = source_of(tmp_path, texts(), kind="answers", val_fraction=0.2)
    train = rows_of(source)
    labels = [int(train[i]["label"]) for i in range(len(train))]
    assert sum(labels) == len(labels) / 2
    shown = [answers[0][1] for answers in samples_of(source)]
    assert [text.startswith("yes") for text in shown] == [bool(label) for label in labels]


# Answers of several turns.


H, A = "\n\nHuman:", "\n\nAssistant:"


@pytest.mark.parametrize("as_messages", [True, False])
def test_of_answers_of_several_turns_those_of_the_assistant_carry_loss(as_messages: bool, tmp_path: Path) -> None:
    """Two conversations that differ from their second turn on, as in Anthropic/hh-rlhf and capybara-dpo."""
    rows: list[Row] = []
    for i in range(12):
        first, chosen, rejected = f" q{i}", [" yes", " why", " so"], [" no", " hm", " that", " ok", " bye"]
        if as_messages:
            roles = (assistant, user)
            turns = [[roles[n % 2](text) for n, text in enumerate(answer)] for answer in (chosen, rejected)]
            rows.append({"chosen": [user(first), *turns[0]], "rejected": [user(first), *turns[1]]})
        else:
            texts = [
                "".join(f"{(A, H)[n % 2]}{text}" for n, text in enumerate(answer)) for answer in (chosen, rejected)
            ]
            rows.append({"chosen": f"{H}{first}{texts[0]}", "rejected": f"{H}{first}{texts[1]}"})
    source = source_of(tmp_path, rows)
    end, turn = "<|endoftext|>", "<|endoftext|>" if as_messages else ""
    expected = {(f" yes{turn}", f" so{end}"), (f" no{turn}", f" that{turn}", f" bye{end}")}
    assert {tuple(part.rstrip("\n") for part in parts) for parts in learned_of(source)} == expected
    assert "answers of 12 rows have several turns, of which only those of the assistant carry loss" in source.describe()
    decode = source.tokenizer.decode
    sample = source.train()[0]
    whole = decode(sample["inputs"][1][: sample["num_inputs"][1]].tolist())
    assert " hm" in whole, "turns of others are read"
    assert whole.count(" q") == 1


def test_a_turn_of_the_assistant_that_both_transcripts_share_is_not_learned(tmp_path: Path) -> None:
    rows = [
        {"chosen": f"{H} q{i}{A} same{H} one{A} good", "rejected": f"{H} q{i}{A} same{H} two{A} bad"} for i in range(12)
    ]
    source = source_of(tmp_path, rows)
    assert learned_of(source) == {(" good<|endoftext|>",), (" bad<|endoftext|>",)}


def test_a_transcript_that_ends_where_the_other_goes_on_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[Row] = [{"chosen": f"{H} q{i}{A} good", "rejected": f"{H} q{i}{A} bad"} for i in range(12)]
    rows[4] = {"chosen": f"{H} q4{A} good{H} and{A} on", "rejected": f"{H} q4{A} good"}
    rows[6] = {name: text + f"{H} thanks" for name, text in rows[6].items()}
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source = source_of(tmp_path, rows)
    assert "because an answer is empty: rows.jsonl:5" in caplog.text
    assert learned_of(source) == {(" good<|endoftext|>",), (" bad<|endoftext|>",), (" good",), (" bad",)}
    assert "several turns" not in source.describe()


# Pitfalls of others, each with the issue in which it was found.


def merging_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes that merges `:` and a space after it."""
    space = byte_alphabet()
    names = {value: name for name, value in space.items()}
    colon, blank = names[ord(":")], names[ord(" ")]
    vocab = space | {"</s>": NUM_BYTES, colon + blank: NUM_BYTES + 1}
    backend = Backend(models.BPE(vocab=vocab, merges=[(colon, blank)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, end_of_text=NUM_BYTES, settings={"tokenizer_class": "PreTrainedTokenizerFast"})


def test_no_token_spans_the_boundary_of_prompt_and_answer(tmp_path: Path) -> None:
    """trl#2054, trl PR#1153, trl PR#2209: the tokens of the prompt are those at inference, where it stands alone."""
    tokenizer = merging_tokenizer()
    assert len(tokenizer.encode("A: b")) == 3, "it merges"
    rows = [{"prompt": f"{i} A:", "chosen": " b", "rejected": "c: d"} for i in range(20)]
    source = source_of(tmp_path, rows, tokenizer=Given(tokenizer))
    train = rows_of(source)
    for index in range(len(train)):
        sample = train[index]
        prompts = set()
        for inputs, targets in zip(sample["inputs"], sample["targets"], strict=True):
            num_given = int((targets != IGNORE_INDEX).int().argmax()) + 1
            prompts.add(tuple(inputs[:num_given].tolist()))
        (prompt,) = prompts
        assert list(prompt) == tokenizer.encode(tokenizer.decode(list(prompt)))
    answers = {pair[0][1] for pair in samples_of(source)} | {pair[1][1] for pair in samples_of(source)}
    assert answers == {" b</s>", "c: d</s>"}


@pytest.mark.parametrize("template", TEMPLATES)
def test_both_answers_follow_one_prompt_under_every_chat_template(template: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(TEMPLATES[template])
    chosen, rejected = ([user("1 + 1?"), assistant(text)] for text in ("It is 2.", "3"))
    rows = [
        {"chosen": chosen, "rejected": rejected},
        {"chosen": [user("b?"), chosen[1]], "rejected": [user("b?"), rejected[1]]},
    ]
    source = source_of(tmp_path, rows, tokenizer=Given(tokenizer), val_fraction=0.5)
    ((good, bad),) = samples_of(source)
    assert good[0] == bad[0]
    assert good[1].strip().startswith("It is 2.")
    assert bad[1].strip().startswith("3")
    assert len(good[1].strip()) > len("It is 2."), "the end of a turn is learned"
    assert good[0].count("<s>") == (0 if template in ("chatml", "tags") else 1), "alignment-handbook#127"


def test_equal_and_empty_answers_are_dropped_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = texts(20)
    rows[3]["rejected"] = rows[3]["chosen"]
    rows[5]["chosen"], rows[7]["rejected"] = "", " \n"
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source = source_of(tmp_path, rows)
    assert len(source.train()) + len(source.val()) == 17
    assert "because both answers are the same: rows.jsonl:4" in caplog.text
    assert "because an answer is empty: rows.jsonl:6, rows.jsonl:8" in caplog.text


def test_prompts_longer_than_the_window_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """trl#1473: without a token of the answer in the window, its mean log-probability is 0 / 0."""
    rows = texts(20)
    for row in rows[:4]:
        row["prompt"] = row["prompt"] + "x" * 40
    rows[9]["chosen"] = "y" * 100
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source = source_of(tmp_path, rows, seq_len=32, val_path=write(tmp_path / "val.jsonl", texts(3)))
    train = rows_of(source)
    assert (len(train), train.num_without_targets, train.num_cut) == (16, 4, 1)
    assert "4 " in caplog.text
    assert all((train[i]["targets"] != IGNORE_INDEX).any(dim=1).all() for i in range(len(train)))
    assert train[5]["inputs"].shape[1] <= 32
    with pytest.raises(ConfigError, match="no answer of the train split begins within 1 tokens"):
        source_of(tmp_path, texts(), seq_len=1)


@pytest.mark.parametrize(("label", "word"), [(True, "good"), (False, "bad")])
def test_answers_of_one_label_are_refused(label: bool, word: str, tmp_path: Path) -> None:
    rows = [row | {"label": label} for row in labelled()]
    with pytest.raises(ConfigError, match=f"answers of the train split are {word}: nothing tells them apart"):
        source_of(tmp_path, rows, kind="answers")


FAULTY: list[tuple[str, Row, str]] = [
    (
        "pairs",
        {"prompt": "a", "chosen": "b"},
        "rows.jsonl:2.* its fields are prompt, chosen, expected prompt, chosen and rejected",
    ),
    ("pairs", {"chosen": "b", "rejected": "c"}, "rows.jsonl:2: it has no prompt"),
    ("pairs", {"prompt": "a", "completion": "b", "label": True}, "rows.jsonl:2: it has one answer with a label"),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": [assistant("c")]}, "rows.jsonl:2: one of its answers is text"),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, "rows.jsonl:2: its margin is big"),
    ("pairs", {"chosen": [assistant("b")], "rejected": [assistant("c")]}, "rows.jsonl:2: its conversations share no"),
    (
        "pairs",
        {"prompt": "z", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
        "rows.jsonl:2: its prompt is not in its conversations",
    ),
    ("answers", {"prompt": "a", "completion": "b"}, "rows.jsonl:2: its fields are prompt, completion, expected.*label"),
    ("answers", {"prompt": "a", "completion": "b", "label": 3}, "rows.jsonl:2: its label is 3"),
]


@pytest.mark.parametrize(("kind", "row", "message"), FAULTY)
def test_a_faulty_row_is_refused_with_file_and_line(kind: str, row: Row, message: str, tmp_path: Path) -> None:
    rows = [texts(1)[0] if kind == "pairs" else labelled(1)[0], row, *texts(5)]
    with pytest.raises(ConfigError, match=message):
        source_of(tmp_path, rows, kind=kind)


def test_other_names_are_mapped_and_the_system_field_too(tmp_path: Path) -> None:
    rows = [{"role_text": "Be brief", "ask": f"{i}?", "good": "yes", "worse": "no", "gap": i / 4} for i in range(20)]
    fields = {"prompt": "ask", "chosen": "good", "rejected": "worse", "margin": "gap", "system": "role_text"}
    source = source_of(tmp_path, rows, fields=fields)
    found = samples_of(source)[0]
    asked = int(found[0][0].split("user\n")[1].split("?")[0])
    assert found[0] == (chat(system("Be brief"), user(f"{asked}?")), "yes<|endoftext|>")
    assert rows_of(source)[0]["margin"] == asked / 4
    left_out = source_of(tmp_path, rows, fields=fields | {"system": None})
    assert samples_of(left_out)[0][0] == (f"{asked}?", "yes<|endoftext|>")
    with pytest.raises(ConfigError, match="of preferences prompt, chosen, rejected, completion, label, margin"):
        source_of(tmp_path, rows, fields={"better": "good"})


def test_margins_are_of_each_pair_and_0_where_there_is_none(tmp_path: Path) -> None:
    rows = [row | {"margin": None if i % 2 else i / 8} for i, row in enumerate(texts(20))]
    source = source_of(tmp_path, rows)
    train = rows_of(source)
    numbers = [int(pair[0][1].removeprefix("yes ").removesuffix("<|endoftext|>")) for pair in samples_of(source)]
    expected = [0.0 if i % 2 else i / 8 for i in numbers]
    assert [float(train[i]["margin"]) for i in range(len(train))] == expected
    batch = pad_samples([train[i] for i in range(4)], seq_len=256)
    loss = BradleyTerry(center_rewards_coefficient=0)
    losses = loss.per_sample(torch.zeros(4, 2), batch)
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(margin)) for margin in expected[:4]])


def test_labels_and_margins_of_csv_files_are_read_from_their_text(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text(
        "prompt,completion,label\n" + "".join(f"{i}?,<{i}>,{(i % 2 == 0, i % 2)[i < 20]}\n" for i in range(40))
    )
    source = source_of(tmp_path, texts(), kind="answers", path=str(tmp_path / "labels.csv"))
    train = rows_of(source)
    numbers = [int(answers[0][1][1:].split(">")[0]) for answers in samples_of(source)]
    expected = [i % 2 if i < 20 else int(i % 2 == 0) for i in numbers]
    assert [int(train[i]["label"]) for i in range(len(train))] == expected
    (tmp_path / "margins.csv").write_text(
        "prompt,chosen,rejected,margin\n" + "".join(f"{i}?,<{i}>,no,{'' if i % 2 else i / 4}\n" for i in range(40))
    )
    source = source_of(tmp_path, texts(), path=str(tmp_path / "margins.csv"))
    numbers = [int(answers[0][1][1:].split(">")[0]) for answers in samples_of(source)]
    expected_margins = [0 if i % 2 else i / 4 for i in numbers]
    assert [float(rows_of(source)[i]["margin"]) for i in range(len(numbers))] == expected_margins


@pytest.mark.parametrize("num_rows", [3, 40, 41])
def test_an_answer_to_another_prompt_is_never_one_to_the_same(num_rows: int, tmp_path: Path) -> None:
    """trl#1911, trl PR#1970: in an odd batch the middle is matched with itself; trl#2554: so is a batch of one."""
    rows = [{"prompt": f"{i // 2}?", "completion": f"<{i // 2}>", "label": i % 2 == 0} for i in range(2 * num_rows)]
    source = source_of(tmp_path, rows, kind="answers", val_path=write(tmp_path / "val.jsonl", labelled(9)))
    train = rows_of(source)
    decode = source.tokenizer.decode
    for index in range(len(train)):
        sample = train[index]
        own = decode(sample["inputs"][0].tolist()).split("?")[0]
        prompt, answer = decode(sample["other_inputs"].tolist()).split("?")
        assert own == prompt
        assert answer.removesuffix(">") != f"<{own}"
        wanted = sample["other_targets"] != IGNORE_INDEX
        assert decode(sample["other_targets"][wanted].tolist()).startswith(answer)


def test_a_small_split_of_one_label_or_prompt_validates_with_answers_of_its_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i // 2}?", "completion": f"<{i // 2}>", "label": i % 2 == 0} for i in range(20)]
    source = source_of(tmp_path, rows, kind="answers", val_fraction=0.01)
    small, decode = source.val(), source.tokenizer.decode
    assert 1 <= len(small) <= 2, "answers to one prompt"
    for index in range(len(small)):
        own, other = (decode(small[index][name].flatten().tolist()) for name in ("inputs", "other_inputs"))
        assert own.split("?")[0] == other.split("?")[0]
        assert f"<{own.split('?')[0]}>" not in other


def test_answers_to_one_prompt_only_are_refused_for_kto(tmp_path: Path) -> None:
    rows = [row | {"prompt": "the same?"} for row in labelled()]
    val_path = write(tmp_path / "val.jsonl", labelled(9))
    with pytest.raises(ConfigError, match="answers of the train split are to one prompt"):
        source_of(tmp_path, rows, kind="answers", val_path=val_path)
    with pytest.raises(ConfigError, match="answers of the val split are to one prompt"):
        source_of(tmp_path, labelled(), kind="answers", val_path=write(tmp_path / "val.jsonl", rows))


@pytest.mark.parametrize("kind", ["pairs", "answers"])
def test_padding_of_an_uneven_validation_carries_no_loss(kind: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, texts() if kind == "pairs" else labelled(), kind=kind, val_fraction=0.2)
    rows = rows_of(source)
    loss = (
        DPO(beta=0.1, kind="sigmoid", label_smoothing=0, nll_weight=0.1)
        if kind == "pairs"
        else KTO(beta=0.1, desirable_weight=1, undesirable_weight=1)
    )
    size = len(rows) - len(rows) % 2 - 1  # odd, so that the second of two ranks fills up
    shares = [RankShare(torch.utils.data.Subset(rows, range(size)), rank=rank, world_size=2) for rank in (0, 1)]
    assert [len(share) for share in shares] == [(size + 1) // 2] * 2
    total = dict.fromkeys(loss.count_names, 0)
    for share in shares:
        batch = pad_samples([share[i] for i in range(len(share))], seq_len=256)
        assert len(batch["inputs"]) == len(batch["id"]) * loss.num_answers
        for name, number in loss.counts(batch).items():
            total[name] += int(number)
    whole = loss.counts(pad_samples([rows[i] for i in range(size)], seq_len=256))
    assert total == {name: int(number) for name, number in whole.items()}
    empty = loss.counts(pad_samples([rows.padding()] * 3, seq_len=256))
    assert not any(int(number) for number in empty.values())


@pytest.mark.parametrize("kind", ["pairs", "answers"])
def test_order_and_ids_are_equal_in_every_process(kind: str, tmp_path: Path) -> None:
    rows = texts() if kind == "pairs" else labelled()
    first, second = (source_of(tmp_path, rows, kind=kind) for _ in range(2))
    again = source_of(tmp_path, rows, kind=kind, cache_dir=str(tmp_path / "another"), num_processes=2)
    copied = pickle.loads(pickle.dumps(first.train()))
    found = [
        [int(train[i]["id"]) for i in range(len(train))]
        for train in (first.train(), second.train(), again.train(), copied)
    ]
    assert found[0] == found[1] == found[2] == found[3]
    assert len(set(found[0])) == len(found[0]), "one for each sample"
    assert first.fingerprint == second.fingerprint == again.fingerprint


def test_the_id_changes_with_an_answer_and_not_with_the_row(tmp_path: Path) -> None:
    """The log-probabilities of the reference are found by it."""
    rows = texts()
    ids = []
    for given in (rows, [*reversed(rows)], [row | {"rejected": "nay"} for row in rows]):
        train = source_of(tmp_path, given).train()
        ids.append({int(train[i]["id"]) for i in range(len(train))})
    assert ids[0] == ids[1]
    assert not ids[0] & ids[2]


def test_a_batch_has_the_chosen_row_of_each_pair_and_then_the_rejected_one(tmp_path: Path) -> None:
    source = source_of(tmp_path, texts())
    rows = rows_of(source)
    batch = pad_samples([rows[i] for i in range(3)], seq_len=256)
    decode = source.tokenizer.decode
    shown = [decode(row[row != IGNORE_INDEX].tolist())[:3] for row in batch["targets"]]
    assert shown == ["yes", "no<"] * 3
    assert batch["inputs"].shape == batch["targets"].shape == (6, 64)
    assert batch["num_inputs"].tolist() == [int(n) for i in range(3) for n in rows[i]["num_inputs"]]
    assert np.array_equal(rows.count_inputs(np.arange(3)), batch["num_inputs"].view(3, 2).sum(dim=1))
