"""A mixture reads each source as if it were alone, in its share, with one tokenizer, and says what is wrong."""

import json
import logging
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipes.data.conversations.source import Conversations
from recipes.data.documents.source import Documents
from recipes.data.mixture.source import Mixture
from recipes.data.order import ShuffledOrder
from recipes.data.random_tokens import RandomTokens
from recipes.data.text_files import TextFiles
from recipes.errors import ConfigError
from recipes.numerics.loss import IGNORE_INDEX
from recipes.tokenizer.bpe import Bpe
from recipes.tokenizer.bytes import Bytes

SEQ_LEN = 16


def text_source(folder: Path, name: str, *, num_files: int = 30, tokenizer: Any = None) -> TextFiles:
    texts = folder / name
    texts.mkdir()
    for index in range(num_files):
        (texts / f"{index:02}.txt").write_text(f"{name} {index}: " + f"{name} says {index * 7919}. " * 8)
    return TextFiles(
        path=str(texts),
        tokenizer=tokenizer or Bytes(),
        seq_len=SEQ_LEN,
        val_fraction=0.2,
        cache_dir=str(folder / "cache"),
    )


def question_source(folder: Path, *, packing: bool = True) -> Conversations:
    path = folder / "sums.jsonl"
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Conversations(
        path=str(path),
        format=None,
        fields={},
        chat_template="auto",
        train_on="answers",
        packing=packing,
        val_path=None,
        val_fraction=0.2,
        split="train",
        tokenizer=Bytes(),
        seq_len=SEQ_LEN,
        cache_dir=str(folder / "cache"),
        image_folder=None,
        image_token_id=None,
        image_seq_length=None,
        transform=None,
    )


def mixture_of(sources: dict[str, Any], weights: dict[str, float], **settings: Any) -> Mixture:
    settings = {"stages": [], "max_epochs": None, "seq_len": SEQ_LEN} | settings
    return Mixture(sources=sources, weights=weights, **settings)


def rows_source(folder: Path, texts: list[str], **settings: Any) -> Documents:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {
        "tokenizer": Bytes(),
        "seq_len": SEQ_LEN,
        "val_fraction": 0.2,
        "cache_dir": str(folder / "cache"),
    } | settings
    return Documents(path=str(path), text_field="text", domain_field=None, split="train", **settings)


def read_tokens(source: Any, split: str) -> list[int]:
    return np.fromfile(source.cache.path(split), dtype=source.cache.meta.dtype).tolist()


def documents_of(source: Any, split: str) -> set[bytes]:
    """Return the documents, or parts of one, of a split."""
    return set(bytes(token if token < 256 else 0 for token in read_tokens(source, split)).split(b"\0")) - {b""}


def two_texts(folder: Path, weights: dict[str, float] | None = None, **settings: Any) -> Mixture:
    sources = {name: text_source(folder, name) for name in ("plain", "fancy")}
    mixture = mixture_of(sources, weights or {"plain": 0.75, "fancy": 0.25}, **settings)
    mixture.prepare()
    return mixture


def test_sources_have_their_shares_and_each_goes_through_its_own_samples(tmp_path: Path) -> None:
    train = two_texts(tmp_path).train()
    places = [train.locate(index) for index in train.make_order(3).indices(np.arange(4000)).tolist()]
    assert Counter(source for source, _ in places) == {0: 3000, 1: 1000}
    for number, part in enumerate(train.parts.values()):
        own = [index for source, index in places if source == number]
        epoch = own[: len(part)]
        assert sorted(epoch) == list(range(len(part))), "every sample once, before any comes again"
        assert own[len(part) : 2 * len(part)] != epoch, "in another order the next time"


def test_another_share_or_another_source_beside_it_keeps_the_order_within_a_source(tmp_path: Path) -> None:
    def own(mixture: Mixture, name: str) -> list[int]:
        train = mixture.train()
        number = mixture.source_names.index(name)
        order = train.make_order(3).indices(np.arange(400)).tolist()
        return [index for source, index in map(train.locate, order) if source == number]

    first = own(two_texts(tmp_path), "fancy")
    sources = {name: text_source(tmp_path, name) for name in ("third", "fourth")}
    sources["fancy"] = two_texts_again(tmp_path)
    other = mixture_of(sources, {"third": 0.25, "fourth": 0.25, "fancy": 0.5})
    other.prepare()
    assert own(other, "fancy")[: len(first)] == first


def two_texts_again(folder: Path) -> TextFiles:
    return TextFiles(
        path=str(folder / "fancy"), tokenizer=Bytes(), seq_len=SEQ_LEN, val_fraction=0.2, cache_dir=str(folder / "c")
    )


def test_a_sample_is_that_of_its_source_with_its_number(tmp_path: Path) -> None:
    mixture = two_texts(tmp_path)
    train = mixture.train()
    last = len(train) - 1
    sample = train[last]
    own = mixture.sources["fancy"].train()
    assert int(sample["source"]) == 1
    assert torch.equal(sample["inputs"], own[len(own) - 1]["inputs"])
    assert mixture.describe_sample(last)["source"] == "fancy"
    assert mixture.describe_sample(last)["text"].startswith(mixture.tokenizer.decode(sample["inputs"].tolist()))
    with pytest.raises(IndexError):
        train[len(train)]


def test_packed_and_plain_rows_share_a_batch(tmp_path: Path) -> None:
    sources = {"text": text_source(tmp_path, "text"), "sums": question_source(tmp_path)}
    mixture = mixture_of(sources, {"text": 0.5, "sums": 0.5})
    mixture.prepare()
    train = mixture.train()
    batch = mixture.collate([train[0], train[len(train) - 1]])
    assert batch["source"].tolist() == [0, 1]
    assert batch["inputs"].shape == batch["positions"].shape == (2, SEQ_LEN)
    assert batch["positions"][0].tolist() == list(range(SEQ_LEN)), "a window of text is one document"
    assert int((batch["positions"][1] == 0).sum()) > 1, "a packed row holds several"
    assert mixture.packs


def test_rows_of_one_example_are_padded_beside_windows_of_text(tmp_path: Path) -> None:
    sources = {"text": text_source(tmp_path, "text"), "sums": question_source(tmp_path, packing=False)}
    mixture = mixture_of(sources, {"text": 0.5, "sums": 0.5})
    mixture.prepare()
    train = mixture.train()
    batch = mixture.collate([train[0], train[len(train) - 1]])
    assert set(batch) == {"inputs", "targets", "num_inputs", "source"}
    assert batch["targets"][0].min() >= 0
    length = len(train[len(train) - 1]["inputs"])
    assert length < SEQ_LEN
    assert batch["num_inputs"].tolist() == [SEQ_LEN, length]
    assert (batch["targets"][1, length:] == IGNORE_INDEX).all()


def test_validation_takes_new_samples_in_the_shares_of_the_last_stage_and_none_twice(tmp_path: Path) -> None:
    stage = {"from": 100, "weights": {"plain": 0.2, "fancy": 0.8}}
    val = two_texts(tmp_path, stages=[stage]).val()
    sources = [int(val[index]["source"]) for index in range(len(val))]
    texts = [tuple(val[index]["inputs"].tolist()) for index in range(len(val))]
    assert len(set(texts)) == len(texts)
    assert sum(sources) == pytest.approx(0.8 * len(val), abs=1)
    few = val.spread(10)
    assert Counter(int(few[index]["source"]) for index in range(10)) == {0: 2, 1: 8}
    whole = [tuple(sample["inputs"].tolist()) for sample in (val[i] for i in range(len(val)))]
    assert tuple(few[9]["inputs"].tolist()) != whole[9], "spread over the split, not its beginning"


def test_one_tokenizer_is_trained_on_the_text_of_all_sources(tmp_path: Path) -> None:
    sources = {
        name: text_source(tmp_path, name, tokenizer=Bpe(vocab_size=300, max_training_bytes=100_000))
        for name in ("aaaa", "zzzz")
    }
    mixture = mixture_of(sources, {"aaaa": 0.5, "zzzz": 0.5})
    mixture.prepare()
    assert mixture.tokenizer is not None
    for name, source in sources.items():
        assert source.tokenizer.fingerprint == mixture.tokenizer.fingerprint
        assert len(mixture.tokenizer.encode(f" {name}")) <= 2, "merges of both"


def test_sources_without_text_mix_as_well() -> None:
    sources = {
        name: RandomTokens(vocab_size=50, seq_len=SEQ_LEN, num_samples=100, seed=seed)
        for seed, name in enumerate(("a", "b"))
    }
    mixture = mixture_of(sources, {"a": 0.5, "b": 0.5})
    mixture.prepare()
    assert mixture.tokenizer is None
    assert mixture.train().targets_per_sample == SEQ_LEN, "constant, so that no window is read ahead"


def test_fingerprints_tell_shares_apart(tmp_path: Path) -> None:
    one = two_texts(tmp_path)
    sources = one.sources
    prints = {one.fingerprint}
    for weights in ({"plain": 0.5, "fancy": 0.5}, {"plain": 0.75, "fancy": 0.25}):
        for stages in ([], [{"from": 10, "weights": {"plain": 0.9, "fancy": 0.1}}]):
            other = mixture_of(sources, weights, stages=stages)
            prints.add(other.fingerprint)
    assert len(prints) == 4


def test_a_run_that_reads_a_source_too_often_is_refused_with_the_number(tmp_path: Path) -> None:
    mixture = two_texts(tmp_path, max_epochs=2.0)
    length = len(mixture.train().parts["plain"])
    most = int(2 * length / 0.75)
    mixture.check_run(most - 2)
    with pytest.raises(ConfigError) as error:
        mixture.check_run(most + 200)
    assert f"read the {length} of plain" in error.value.reason
    assert "data.max_epochs=3" in error.value.fix


@pytest.mark.parametrize(
    ("num_samples", "unreached"), [(10, "[0], data.stages[1] never begin:"), (11, "[1] never"), (21, "")]
)
def test_stages_that_a_run_never_reaches_are_named(num_samples: int, unreached: str, caplog: Any) -> None:
    stages = [{"from": at, "weights": {"a": 1.0}} for at in (10, 20)]
    mixture_of({"a": RandomTokens(vocab_size=9, seq_len=SEQ_LEN, num_samples=9)}, {"a": 1.0}, stages=stages).check_run(
        num_samples
    )
    assert (f"data.stages{unreached}" in caplog.text) if unreached else not caplog.text


@pytest.mark.parametrize(
    ("weights", "reason", "fix"),
    [
        (
            {"plain": 3, "fancy": 1},
            "weights must add up to 1; these add up to 4",
            "data.weights={plain: 0.75, fancy: 0.25}",
        ),
        ({"plain": 1.0}, "the sources are plain, fancy", "data.weights={plain: 1, fancy: 0}"),
        ({"plain": 0.7}, "the sources are plain, fancy", "data.weights={plain: 0.5, fancy: 0.5}"),
        ({"plain": 0.6, "fancy": 0.2, "x": 0.2}, "the sources are", "data.weights={plain: 0.75, fancy: 0.25}"),
        ({"plain": 0.5, "fancy": "x", "x": 0.1}, "the sources are", "data.weights={plain: 0.5, fancy: 0.5}"),
        ({"plain": 1.5, "fancy": -0.5}, "numbers from 0 to 1", "data.weights={plain: 0.5, fancy: 0.5}"),
        ({"plain": "half", "fancy": 0.5}, "numbers from 0 to 1", "data.weights="),
        ({"plain": 0.99999, "fancy": 0.00001}, "less than one", "{plain: 0.9999, fancy: 0.0001}"),
        ({"plain": True, "fancy": 0}, "numbers from 0 to 1", "data.weights={plain: 0.5, fancy: 0.5}"),
        ({"plain": None, "fancy": 1}, "numbers from 0 to 1", "data.weights={plain: 0.5, fancy: 0.5}"),
        ({"plain": 0, "fancy": 0}, "these add up to 0", "data.weights={plain: 0.5, fancy: 0.5}"),
    ],
)
def test_wrong_weights_are_answered_with_right_ones(weights: Any, reason: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        two_texts(tmp_path, weights)
    assert reason in error.value.reason
    assert fix in error.value.fix
    assert error.value.setting.startswith("data.weights={")


HALF = {"plain": 0.5, "fancy": 0.5}


@pytest.mark.parametrize(
    ("stages", "setting", "reason"),
    [
        ([{"from": 0, "weights": HALF}], "data.stages[0].from=0", "are those from the start"),
        ([{"from": 10**20, "weights": HALF}], f"data.stages[0].from={10**20}", "no run gets there"),
        ([{"from": 0.5, "weights": HALF}], "data.stages[0].from=0.5", "a whole number of samples"),
        ([{"from": None, "weights": HALF}], "data.stages[0].from=null", "a whole number of samples"),
        ([{"at": 5}], "data.stages[0]={at: 5}", "a stage has a position"),
        ([3], "data.stages[0]=3", "a stage has a position"),
        ([{"from": 5, "weights": {"plain": 0.5, "fancy": 0.6}}], "data.stages[0].weights=", "add up to 1.1"),
        ([{"from": 5, "weights": 1}], "data.stages[0].weights=1", "the sources are plain, fancy"),
        ([{"from": at, "weights": HALF} for at in (10, 10)], "data.stages[1].from=10", "begins at sample 10"),
        ([{"from": at, "weights": HALF} for at in (60, 20)], "data.stages[1].from=20", "begins at sample 60"),
        (
            [{"form": 20, "weights": {"plain": 0.1, "fancy": 0.9}}],
            "data.stages[0]={form: 20, ",
            "a stage has a position",
        ),
    ],
)
def test_wrong_stages_are_named_and_the_list_that_is_advised_is_right(
    stages: list[Any], setting: str, reason: str, tmp_path: Path
) -> None:
    sources: dict[str, Any] = {"plain": Bytes(), "fancy": Bytes()}  # nothing is read from them
    with pytest.raises(ConfigError) as error:
        mixture_of(sources, HALF, stages=stages)
    assert error.value.setting.startswith(setting)
    assert reason in error.value.reason
    settings = {key: value for key, _, value in (word.partition("=") for word in shlex.split(error.value.fix))}
    typed = {key: OmegaConf.to_container(OmegaConf.create(value)) for key, value in settings.items()}
    mixture_of(sources, typed.get("data.weights", HALF), stages=typed["data.stages"])
    positions = [stage.get("from", stage.get("form")) for stage in stages if isinstance(stage, dict)]
    if set(positions) in ({20}, {20, 60}):  # what the user typed is kept, in order
        assert [stage["from"] for stage in typed["data.stages"]] == sorted(positions)
        assert typed["data.stages"][0]["weights"] == stages[-1]["weights"]


@pytest.mark.parametrize("count", [1, 3, 7, 60])
def test_weights_that_are_advised_add_up_to_one(count: int) -> None:
    sources: dict[str, Any] = {f"s{number}": Bytes() for number in range(count)}
    for weights in ({}, dict.fromkeys(sources, 3)):
        with pytest.raises(ConfigError) as error:
            mixture_of(sources, weights)
        typed = error.value.fix.strip("'").removeprefix("data.weights=")
        mixture_of(sources, OmegaConf.to_container(OmegaConf.create(typed)))  # type: ignore[arg-type]


def test_names_of_sources_may_be_numbers_and_a_position_may_be_written_as_1e3() -> None:
    sources: dict[Any, Any] = {"1": RandomTokens(vocab_size=9, seq_len=SEQ_LEN, num_samples=10)}
    mixture = mixture_of(sources, {1: 1.0}, stages=[{"from": 1e3, "weights": {1: 1.0}}])  # type: ignore[dict-item]
    assert mixture.source_names == ["1"]


def test_a_sample_longer_than_those_of_the_mixture_is_refused(tmp_path: Path) -> None:
    mixture = mixture_of({"text": text_source(tmp_path, "text")}, {"text": 1.0}, seq_len=SEQ_LEN // 2)
    with pytest.raises(
        ConfigError, match="text.seq_len=16: .* has at most 8 tokens; type data.sources.text.seq_len=8$"
    ):
        mixture.prepare()


def test_a_mixture_of_nothing_shows_how_to_add_a_source() -> None:
    with pytest.raises(ConfigError, match=r"\+data@data\.sources\.code=stdlib_text"):
        mixture_of({}, {})


def test_a_mistake_in_a_source_names_its_place_in_the_config(tmp_path: Path) -> None:
    sources = {"plain": text_source(tmp_path, "plain"), "none": text_source(tmp_path, "none", num_files=0)}
    with pytest.raises(ConfigError) as error:
        mixture_of(sources, {"plain": 0.5, "none": 0.5}).prepare()
    assert error.value.setting.startswith("data.sources.none.path=")
    assert "data.sources.none.path=" in error.value.fix


def test_a_source_alone_is_the_source_without_a_mixture(tmp_path: Path) -> None:
    mixture = mixture_of({"only": text_source(tmp_path, "only")}, {"only": 1.0})
    mixture.prepare()
    train = mixture.train()
    order = train.make_order(5)
    alone = ShuffledOrder(len(train), order._orders[0].seed)
    assert order.indices(np.arange(100)).tolist() == alone.indices(np.arange(100)).tolist()


@pytest.mark.parametrize("num_files", [30, 5])  # complete documents are held out, or the tail of the text
def test_a_text_of_two_sources_is_in_one_split(
    tmp_path: Path, num_files: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_recipes")
    files = text_source(tmp_path, "shared", num_files=num_files)
    shared = [path.read_text() for path in sorted(Path(files.path).iterdir())]
    rows = rows_source(tmp_path, [*reversed(shared), *(f"own {index} " * 9 for index in range(40))])
    (tmp_path / "alone").mkdir()
    alone = text_source(tmp_path / "alone", "shared", num_files=num_files)
    alone.prepare()
    mixture = mixture_of({"files": files, "rows": rows}, {"files": 0.5, "rows": 0.5})
    mixture.prepare()
    train, val = (documents_of(files, split) | documents_of(rows, split) for split in ("train", "val"))
    known = {text.encode() for text in shared}
    assert not train & val
    if num_files == 30:
        assert len(val & known) > 1
        assert train | val >= known, "each text is complete in its split"
        assert documents_of(alone, "val") <= val, "what a source holds out alone stays held out"
    else:
        cut = (documents_of(files, "train") & documents_of(rows, "train")) - known
        assert all(any(text.startswith(head) for text in known) for head in cut), "cut at the same token in both"
    assert "validation data of another source, so held out here, too" in caplog.text
    assert (
        f"Copying the cached {rows.cache.meta.num_train_tokens + rows.cache.meta.num_val_tokens:,} tokens"
        in caplog.text
    )
    # all tokens are still there, and the split is found again in the cache
    assert sorted(read_tokens(files, "train") + read_tokens(files, "val")) == sorted(
        read_tokens(alone, "train") + read_tokens(alone, "val")
    )
    assert len(mixture.train()) > 0
    assert rows.cache.meta.held_out
    assert rows.fingerprint.endswith(f"/{rows.cache.meta.held_out}")


def test_sources_without_a_text_in_common_keep_the_split_they_have_alone(tmp_path: Path) -> None:
    mixture = two_texts(tmp_path)
    for name, source in mixture.sources.items():
        alone = TextFiles(
            path=str(tmp_path / name),
            tokenizer=Bytes(),
            seq_len=SEQ_LEN,
            val_fraction=0.2,
            cache_dir=str(tmp_path / "cache"),
        )
        alone.prepare()
        assert source.fingerprint == alone.fingerprint
        assert source.cache.folder == alone.cache.folder  # type: ignore[attr-defined]


def test_a_question_of_two_sources_and_a_document_are_in_one_split_also_in_a_mixture_of_mixtures(
    tmp_path: Path,
) -> None:
    (tmp_path / "more").mkdir()
    first, second = question_source(tmp_path), question_source(tmp_path / "more")
    second._val_fraction = 0.5
    documents = rows_source(tmp_path, [f"{i}+1=" for i in range(0, 200, 2)] + [f"own {i} " * 5 for i in range(40)])
    inner = mixture_of({"first": first, "documents": documents}, {"first": 0.5, "documents": 0.5})
    outer = mixture_of({"inner": inner, "second": second}, {"inner": 0.5, "second": 0.5})
    outer.prepare()
    texts = outer.split_texts()
    trained, held_out = texts["key"][texts["num_train"] > 0], texts["key"][texts["num_train"] < texts["num_tokens"]]
    assert len(trained) > 100
    assert len(held_out) > 200
    assert not np.isin(trained, held_out).any()
    assert len(inner.train().parts["first"]) == len(first.train()), "the inner mixture reads the new split"
    questions = {tuple(prompt) for prompt, _ in first.questions(1000)}
    assert len(questions) > 70, "about half of the 200, not a fifth"


def test_a_mixture_without_padding_counts_no_inputs_so_that_its_operators_can_be_counted(tmp_path: Path) -> None:
    mixture = mixture_of({name: text_source(tmp_path, name) for name in "ab"}, {"a": 0.5, "b": 0.5})
    mixture.prepare()
    assert mixture.train().count_inputs is None


@pytest.mark.parametrize("packing", [True, False])
def test_tokens_of_each_source_are_counted_without_padding_at_any_position(tmp_path: Path, packing: bool) -> None:
    sources = {"text": text_source(tmp_path, "text"), "sums": question_source(tmp_path, packing=packing)}
    mixture = mixture_of(sources, {"text": 0.25, "sums": 0.75})
    mixture.prepare()
    train = mixture.train()
    lengths = [int(train[index].get("num_inputs", len(train[index]["inputs"]))) for index in range(len(train))]
    assert train.count_inputs is not None
    assert train.count_inputs(np.arange(len(train))).tolist() == lengths
    order, counts, expected = train.make_order(5), {"text": 0, "sums": 0}, []
    for position in range(3 * len(train)):  # several epochs of the questions
        expected.append(dict(counts))
        sample = order(position)
        counts[mixture.source_names[train.locate(sample)[0]]] += lengths[sample]
    for position in (0, 7, 8, len(train), 3 * len(train) - 1, 11):  # the last one after a rollback
        assert train.count_tokens(position, seed=5) == expected[position], position
