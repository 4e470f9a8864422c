"""Images with captions of tables, hub datasets and shards: the same pairs from each, in any process."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from captioned_images import (
    SEQ_LEN,
    caption_each,
    encode_noise,
    make_source,
    write_csv,
    write_images,
    write_jsonl,
    write_shard,
)
from streams import open_stream
from torch.utils.data import DataLoader
from transformed_images import make_transform

from recipes.data.batches import PositionSampler, RankShare
from recipes.data.captions import CaptionTokens, list_captions
from recipes.data.draws import DrawnSamples, rng_at
from recipes.data.image_text import ImageText
from recipes.data.loader_process import SignalProofLoader
from recipes.data.order import ShuffledOrder
from recipes.errors import ConfigError
from recipes.tokenizer import read_folder
from recipes.tokenizer.bpe import Bpe
from recipes.tokenizer.huggingface import HuggingFace

pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")
NUM_IMAGES = 16
CAPTIONS = caption_each(NUM_IMAGES)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a CSV with two rows of each image."""
    names = write_images(tmp_path, NUM_IMAGES)
    rows = [(name, caption) for name, captions in zip(names, CAPTIONS, strict=True) for caption in captions]
    return write_csv(tmp_path / "captions.csv", rows)


def list_pairs(source: ImageText) -> list[tuple[bytes, str]]:
    """Return the pixels of every image with every one of its captions."""
    source.hold_out_all()
    source.prepare()
    tokenizer, pairs = source.tokenizer, source.val()
    assert tokenizer is not None
    read = (pairs[number] for number in range(len(pairs)))
    decoded = ((pair["inputs"].numpy().tobytes(), pair["tokens"][pair["is_token"]].tolist()[:-1]) for pair in read)
    return sorted((pixels, tokenizer.decode(ids)) for pixels, ids in decoded)


def list_texts(path: Path, **settings: Any) -> set[str]:
    """Return the captions of few images."""
    return {text for _, text in list_pairs(make_source(path, val_path=str(path), **settings))}


def prepared(source: ImageText) -> ImageText:
    source.prepare()
    return source


def explain(source: ImageText) -> str:
    with pytest.raises(ConfigError) as caught:
        source.prepare()
    return str(caught.value)


def test_tables_bytes_saved_datasets_and_shards_have_the_same_pairs(table: Path, tmp_path: Path) -> None:
    expected = list_pairs(make_source(table))
    assert len(expected) == 2 * NUM_IMAGES
    assert len({*expected}) == 2 * NUM_IMAGES
    lists = [{"image": f"{number}.png", "caption": captions} for number, captions in enumerate(CAPTIONS)]
    assert list_pairs(make_source(write_jsonl(tmp_path / "lists.jsonl", lists))) == expected
    columns = [{"image": f"{number}.png", "a": first, "b": last} for number, (first, last) in enumerate(CAPTIONS)]
    two = make_source(write_jsonl(tmp_path / "two.jsonl", columns), caption=["a", "b"])
    assert list_pairs(two) == expected
    members = [(f"{number}.png", encode_noise(number)) for number in range(NUM_IMAGES)]
    fields = [
        (f"{number}.json", json.dumps({"caption": captions, "url": "x"}).encode())
        for number, captions in enumerate(CAPTIONS)
    ]
    (tmp_path / "shards").mkdir()
    for shard in (0, 1):
        write_shard(tmp_path / "shards" / f"{shard}.tar", [*members[shard::2], *fields[shard::2]])
    assert list_pairs(make_source(tmp_path / "shards")) == expected
    assert list_pairs(make_source(tmp_path / "shards" / "*.tar")) == expected
    texts = [(f"{number}.txt", f"{captions[0]}\n".encode()) for number, captions in enumerate(CAPTIONS)]
    single = write_shard(tmp_path / "one.tar", [*members, *texts])
    assert {caption for _, caption in list_pairs(make_source(single, caption="txt"))} == {each[0] for each in CAPTIONS}


def test_columns_of_bytes_are_read_from_parquet_and_saved_datasets(table: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    expected = list_pairs(make_source(table))
    images = [encode_noise(number) for number in range(NUM_IMAGES)]
    cells = [{"bytes": image, "path": None} for image in images]
    pyarrow.parquet.write_table(arrow.table({"image": cells, "caption": CAPTIONS}), tmp_path / "rows.parquet")
    assert list_pairs(make_source(tmp_path / "rows.parquet")) == expected
    datasets = pytest.importorskip("datasets")
    flat = [(cell, caption) for cell, captions in zip(cells, CAPTIONS, strict=True) for caption in captions]
    rows = {"image": [cell for cell, _ in flat], "caption": [caption for _, caption in flat]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    saved = make_source(f"hf://{tmp_path / 'saved'}", cache_dir=str(tmp_path / "cache"))
    assert list_pairs(saved) == expected
    assert len(saved._splits["val"]) == NUM_IMAGES, "rows with the same bytes are one image"
    store: Any = saved._get_split("val").store
    assert store.cached.stat().st_size == sum(map(len, images)), "each is kept once"


def test_shards_in_a_store_give_the_pairs_of_local_ones(tmp_path: Path) -> None:
    import fsspec

    members = [
        member
        for number, captions in enumerate(CAPTIONS)
        for member in ((f"{number}.png", encode_noise(number)), (f"{number}.txt", captions[0].encode()))
    ]
    local = write_shard(tmp_path / "0.tar", members)
    fsspec.filesystem("memory").pipe("/captioned/0.tar", local.read_bytes())
    remote = make_source("memory://captioned", caption="txt", cache_dir=str(tmp_path / "cache"))
    assert list_pairs(remote) == list_pairs(make_source(local, caption="txt"))


def test_a_sample_is_an_image_with_one_of_its_captions_by_seed_and_position(table: Path) -> None:
    train = prepared(make_source(table)).train()
    sample = train.sample(0, rng_at(1, 5))
    assert {name: (each.dtype, [*each.shape]) for name, each in sample.items()} == {
        "inputs": (torch.float32, [3, 8, 8]),
        "tokens": (torch.int64, [SEQ_LEN]),
        "is_token": (torch.bool, [SEQ_LEN]),
        "caption": (torch.int64, []),
        "image": (torch.int64, []),
        "targets": (torch.int64, []),
    }
    again = train.sample(0, rng_at(1, 5))
    assert all(torch.equal(value, again[name]) for name, value in sample.items())
    drawn = [train.sample(0, rng_at(1, position)) for position in range(200)]
    counts = torch.stack([each["caption"] for each in drawn]).unique(return_counts=True)[1].tolist()
    assert len(counts) == 2
    assert min(counts) > 70, counts  # 100 each, of deviation 7
    assert train.sample(3, rng_at(1, 5))["image"] == 3
    assert not torch.equal(drawn[0]["inputs"], drawn[1]["inputs"])


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_no_loader_processes_1_and_3_and_a_resume_draw_the_same(table: Path) -> None:
    train: Any = prepared(make_source(table)).train()

    def read(num_workers: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
        options = {"micro_batch_size": 4, "rank": 0, "world_size": 1, "num_micro_batches": 6 - start // 4}
        sampler: Any = PositionSampler(ShuffledOrder(len(train), 3), start_position=start, draws=True, **options)
        loader: Any = SignalProofLoader(DrawnSamples(train, 3), batch_sampler=sampler, num_workers=num_workers)
        return list(loader)

    alone = read(0)
    for other in (read(1), read(3)):
        for one, same in zip(alone, other, strict=True):
            assert all(torch.equal(value, same[name]) for name, value in one.items())
            assert one["inputs"].stride() == same["inputs"].stride()
    for one, same in zip(alone[2:], read(1, start=8), strict=True):
        assert all(torch.equal(value, same[name]) for name, value in one.items())


def test_all_captions_of_an_image_are_on_one_side_and_stay_there(table: Path, tmp_path: Path) -> None:
    source = prepared(make_source(table))
    assert len(source.train()) + len(source._splits["val"]) == NUM_IMAGES
    assert len(source.val()) == 2 * len(source._splits["val"])
    captions = {name: {*source._get_split(name).list_texts()} for name in ("train", "val")}
    assert not captions["train"] & captions["val"]
    assert captions["train"] | captions["val"] == {caption for each in CAPTIONS for caption in each}
    images = write_images(tmp_path, NUM_IMAGES + 6)
    rows = [(name, f"another {which} {name}") for name in reversed(images) for which in range(3)]
    more = prepared(make_source(write_csv(tmp_path / "more.csv", rows)))

    def names(of: ImageText, split: str) -> set[str]:
        held = of._splits[split]
        return {Path(held.store.name(int(number))).name for number in held.numbers}

    for split in ("train", "val"):
        assert names(source, split) <= names(more, split)


def test_a_validation_reads_every_pair_in_order_with_the_number_of_its_image(table: Path) -> None:
    val = prepared(make_source(table)).val()
    pairs = [val[number] for number in range(len(val))]
    assert [int(pair["image"]) for pair in pairs] == [number // 2 for number in range(len(val))]
    assert len({int(pair["caption"]) for pair in pairs}) == len(val)
    assert all(
        torch.equal(first["inputs"], last["inputs"]) for first, last in zip(pairs[::2], pairs[1::2], strict=True)
    )
    assert getattr(val, "sample", None) is None
    padded = RankShare(val, rank=1, world_size=len(val) - 1)
    assert [int(padded[number]["targets"]) for number in range(2)] == [0, -100]
    batch = next(iter(DataLoader(val, batch_size=4)))
    assert batch["is_token"].shape == (4, SEQ_LEN)
    with pytest.raises(IndexError):
        val[len(val)]


def test_rows_of_one_relative_path_in_two_folders_are_two_images(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        write_images(tmp_path / name, 1 + number)
        (tmp_path / name / "0.png").write_bytes(encode_noise(50 + number))
        write_csv(tmp_path / name / "rows.csv", [("0.png", f"image {name}"), ("./0.png", "again")])
    both = prepared(make_source(tmp_path / "**" / "*.csv", val_path=str(tmp_path / "a" / "rows.csv")))
    assert len(both.train()) == 2
    assert len(both.val()) == 2, "./0.png and 0.png are one image with two captions"
    assert {*both._get_split("train").list_texts()} == {"image a", "image b", "again"}


def save_clip_tokenizer(folder: Path) -> None:
    """Save a tokenizer of transformers' class for CLIP, with a small vocabulary of its kind."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    backend = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, end_of_word_suffix="</w>")
    backend.train_from_iterator((caption.replace(" ", "  ") for each in CAPTIONS for caption in each), trainer=trainer)
    model = json.loads(backend.to_str())["model"]
    letters = {f"{letter}</w>" for letter in alphabet} - {*model["vocab"]}
    words = [*sorted(model["vocab"], key=model["vocab"].__getitem__), *sorted(letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {word: number for number, word in enumerate(words)}
    CLIPTokenizer(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]]).save_pretrained(str(folder))


def save_siglip_tokenizer(folder: Path) -> None:
    """Save a tokenizer as of SigLIP: unigrams of lower-cased text without punctuation; `</s>` ends and pads."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), ""), normalizers.Strip()]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator((caption for each in CAPTIONS for caption in each), trainer=trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": "<unk>"}))


@pytest.mark.parametrize(("save", "seq_len"), [(save_clip_tokenizer, 12), (save_siglip_tokenizer, 10)])
def test_tokens_are_those_of_transformers_with_padding_and_truncation(save: Any, seq_len: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save(tmp_path / "tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    tokens = CaptionTokens(read_folder(tmp_path / "tokenizer"), seq_len=seq_len)
    captions = [
        *(caption for each in CAPTIONS for caption in each),
        "A Red, RED disc!",
        "é 漢 😀",
        "disc " * 50,
        "it's  a\ttest\n of blanks",
        "x",
    ]
    for caption in captions:
        expected = theirs(caption, padding="max_length", truncation=True, max_length=seq_len)
        ids, is_token = tokens.encode(caption)
        assert ids.tolist() == expected["input_ids"], caption
        assert is_token.tolist() == [bool(each) for each in expected["attention_mask"]], caption
    long, is_token = tokens.encode("disc " * 50)
    assert int(long[-1]) == tokens.tokenizer.end_of_text
    assert is_token.all()


def test_a_tokenizer_is_trained_on_the_captions_of_training_or_is_that_of_other_data(
    table: Path, tmp_path: Path
) -> None:
    source = prepared(make_source(table, tokenizer=Bpe(vocab_size=300)))
    assert source.tokenizer is not None
    assert 258 <= source.tokenizer.vocab_size <= 300
    assert "".join(source.corpus().texts(1 << 30)) == "".join(source._get_split("train").list_texts())
    other = make_source(table, seq_len=30)
    other.prepare(source.tokenizer)
    assert other.tokenizer is source.tokenizer
    save_siglip_tokenizer(tmp_path / "tokenizer")
    small = make_source(table, tokenizer=HuggingFace(name=str(tmp_path / "tokenizer")), vocab_size=20)
    assert explain(small).startswith("model.vocab_size=20: the tokenizer has ")


def test_the_log_line_counts_what_is_cut_repeated_and_empty(tmp_path: Path) -> None:
    write_images(tmp_path, 8)
    captions = [["short", "short"], ["short", " "], *([f"number {number}" + "!" * 40] for number in range(6))]
    rows = [{"image": f"{number}.png", "caption": each} for number, each in enumerate(captions)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    source = prepared(make_source(path, val_path=str(path)))
    line = source.describe()
    lengths = [5, 5, *[8 + 40] * 6]
    lost = sum(max(length - (SEQ_LEN - 1), 0) for length in lengths) / sum(lengths)
    assert line.startswith(
        "8 training images of 1 caption each, and 8 validation pairs of 8 images; 75.00% of the captions are cut to 24"
        f" tokens, and lose {lost:.2%} of all tokens; 1 caption of training is that of an image before, too; "
    ), line
    assert "2 empty captions left out" in line
    assert source.describe_skipped() == ""


def test_a_fingerprint_changes_with_captions_tokens_and_transform(table: Path, tmp_path: Path) -> None:
    def of(**settings: Any) -> tuple[str, str]:
        path = settings.pop("path", table)
        source = prepared(make_source(path, **settings))
        return source.fingerprint, source.val_fingerprint

    base = of()
    assert base == of()
    for changed in (of(seq_len=20), of(tokenizer=Bpe(vocab_size=300)), of(transform=make_transform(flip=0.0, size=10))):
        assert changed[0] != base[0]
        assert changed[1] != base[1]
    other = tmp_path / "other.csv"
    other.write_text(table.read_text().replace("disc", "disk"))
    assert of(path=other)[0] != base[0]


def test_a_step_is_described_with_the_captions_that_were_drawn(table: Path) -> None:
    source = prepared(make_source(table))
    assert source.tokenizer is not None
    for position in range(6):
        sample = source.train().sample(2, rng_at(7, position))
        described = source.describe_drawn(2, rng_at(7, position))
        assert source.tokenizer.decode(sample["tokens"][sample["is_token"]].tolist()[:-1]) == described["caption"]
        assert described["image"].startswith("captions.csv:")


def test_a_bad_image_is_named_or_replaced_with_the_caption_of_the_next(
    table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "3.png").write_bytes(encode_noise(3)[:60])
    source = prepared(make_source(table, val_path=str(table)))
    with pytest.raises(ConfigError, match=r"captions.csv:8, .*3.png: it is damaged"):
        source.val()[7]
    assert [place for place, _ in source.val().find_bad(range(4, 10))] == [f"captions.csv:8, {tmp_path / '3.png'}"]
    assert [*source.train().find_bad([2, 4])] == []
    skipping = prepared(make_source(table, val_path=str(table), on_bad_image="skip"))
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        pair, expected = skipping.val()[7], skipping.val()[9]
    assert all(torch.equal(pair[name], expected[name]) for name in pair)
    assert skipping.describe_skipped().startswith("1 of 16 validation images could not be decoded")


ROWS = {  # cell -> what is said of it
    "null": (None, "rows.jsonl:1: its caption is empty; type the rows without those that have no caption"),
    "blank": (" \n\u00a0", "rows.jsonl:1: its caption is empty; type"),
    "no list": ([], "rows.jsonl:1: its caption is empty; type"),
    "blank list": (["", None], "rows.jsonl:1: its caption is empty; type"),
    "number": (5, "rows.jsonl:1: its caption is 5, and a caption is text; type data.caption=<a column of texts"),
    "true": (True, "rows.jsonl:1: its caption is true, and a caption is text; type data.caption="),
    "object": ({"raw": "a"}, 'rows.jsonl:1: its caption is {"raw": "a"}, and a caption is text; type data.caption='),
    "objects": ([{"raw": "a"}], 'rows.jsonl:1: its caption has an object in [{"raw": "a"}], and a caption is text'),
    "lists": ([["a"]], 'rows.jsonl:1: its caption has a list in [["a"]], and a caption is text; type'),
    "long": ("a" * 70_000, "rows.jsonl:1: its caption has 70,000 characters, and more than 65,536 are no caption"),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_cell_that_is_no_caption_is_named_with_its_row(case: str, tmp_path: Path) -> None:
    cell, expected = ROWS[case]
    write_images(tmp_path, 2)
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"image": "0.png", "caption": cell}, {"image": "1.png", "caption": "b"}]
    )
    assert explain(make_source(path)).startswith(expected)


def test_marks_line_ends_emoji_and_nul_are_text(tmp_path: Path) -> None:
    write_images(tmp_path, 4)
    cells = ["\ufeffmarked", "two\r\nlines\r\n", "😀 ü", "nul\0byte"]
    rows = [{"image": f"{number}.png", "caption": cell} for number, cell in enumerate(cells)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert list_texts(path) == {"marked", "two\r\nlines", "😀 ü", "nul\0byte"}
    (tmp_path / "rows.csv").write_bytes('\ufeffimage,caption\r\n0.png,"one, two"\r\n1.png,"a ""b"""\r\n'.encode())
    assert list_texts(tmp_path / "rows.csv") == {"one, two", 'a "b"'}
    members = [("0.png", encode_noise(0)), ("0.txt", "\ufeffmarked\r\n".encode())]
    write_shard(tmp_path / "0.tar", [*members, ("1.png", encode_noise(1)), ("1.txt", b"b\0")])
    assert list_texts(tmp_path / "0.tar", caption="txt") == {"marked", "b\0"}
    assert list_captions([["a", "a ", None], "b"]) == (["a", "b"], 1)


def test_half_a_surrogate_pair_is_no_caption(tmp_path: Path) -> None:
    write_images(tmp_path, 1)
    (tmp_path / "rows.jsonl").write_text('{"image": "0.png", "caption": "a \\ud83d"}\n')
    assert explain(make_source(tmp_path / "rows.jsonl")).startswith("rows.jsonl:1")


def test_mistakes_in_tables_say_what_to_do(table: Path, tmp_path: Path) -> None:
    assert explain(make_source(table, caption="text")) == (
        "data.caption=text: captions.csv:2 has image, caption; type data.caption=<one of them>"
    )
    assert explain(make_source(table, image="file")) == (
        "data.image=file: captions.csv:2 has image, caption; type data.image=<one of them>"
    )
    assert "there is no " in explain(make_source(write_csv(tmp_path / "no.csv", [("none.png", "a")])))
    (tmp_path / "empty.jsonl").write_text("")
    assert explain(make_source(tmp_path / "empty.jsonl")).startswith(f"data.path={tmp_path}/empty.jsonl: it ")
    one = write_csv(tmp_path / "one.csv", [("0.png", "a"), ("0.png", "b")])
    assert explain(make_source(one)) == (
        "data.val_fraction=0.25: 1 image leave none for validation; type data.val_path=<images for validation>"
    )
    with pytest.raises(ConfigError, match="only a path that begins with hf:// has splits"):
        make_source(table, val_split="test")


def test_mistakes_in_shards_say_what_to_do(tmp_path: Path) -> None:
    image, path = ("1.png", encode_noise(0)), tmp_path / "0.tar"
    write_shard(path, [image])
    assert explain(make_source(path)) == (
        f"data.path={path}: 1.png has no member 1.json; type data.caption=cls, txt or a field of .json, or other shards"
    )
    write_shard(path, [image, ("1.json", b'{"title": "a"}')])
    assert explain(make_source(path)) == (
        f"data.caption=caption: {path} 1.json has title; type data.caption=<one of them>"
    )
    write_shard(path, [image, ("1.json", b'{"caption": null}')])
    assert explain(make_source(path)).startswith("0.tar 1.png: its caption is empty; type the rows without")
    write_shard(path, [image, ("1.json", b'["caption"]')])
    assert explain(make_source(path)).startswith(f"{path} 1.json: it is no JSON object in UTF-8")
    write_shard(path, [image, ("1.txt", b"\xff\xfe")])
    assert explain(make_source(path, caption="txt")).startswith(f"{path} 1.txt: it is no text in UTF-8")
    write_shard(path, [image, ("1.txt", b"a" * (1 << 21))])
    assert "it has 2,097,152 bytes, and more than 1,048,576 are not read" in explain(make_source(path, caption="txt"))
    write_shard(path, [("1.txt", b"a")])
    assert "no member of them ends with" in explain(make_source(path, caption="txt"))
    path.write_bytes(b"")
    assert f"data.path={path}" in explain(make_source(path, caption="txt"))


def test_settings_that_contradict_captions_are_refused(table: Path) -> None:
    for settings, expected in (
        ({"transform": make_transform(mixup=0.2)}, "transform.mixup=0.2 transform.cutmix=0.0: a mixed image has no"),
        ({"transform": make_transform(views=2)}, "transform.views=2: an image is compared with captions"),
        ({"tokenizer": {}}, "tokenizer=none: captions need a tokenizer; type tokenizer=bpe"),
    ):
        with pytest.raises(ConfigError) as caught:
            make_source(table, **settings)
        assert str(caught.value).startswith(expected)
    assert explain(make_source(table, seq_len=1)) == (
        "data.seq_len=1: the tokenizer's own tokens take 1, which leaves none for a caption; type seq_len=2 or more"
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_step_names_its_images_and_the_captions_that_were_drawn(table: Path) -> None:
    source = prepared(make_source(table))
    data, batches = open_stream(source, micro_batch_size=2, accumulate=2, num_workers=1)
    step = [next(batches), next(batches)]
    samples = data.samples_of_step(4)
    assert source.tokenizer is not None
    for number, sample in enumerate(samples):
        batch, row = step[number // 2], number % 2
        assert int(batch["image"][row]) == sample["sample"]
        ids = batch["tokens"][row][batch["is_token"][row]].tolist()[:-1]
        assert source.tokenizer.decode(ids) == sample["caption"]
        assert batch["num_samples"] == 2


def test_captions_that_are_all_the_same_are_doubted_and_targets_of_0_are_not(table: Path, tmp_path: Path) -> None:
    def doubt(path: Path) -> list[str]:
        data, _ = open_stream(prepared(make_source(path, val_path=str(table))))
        return [str(each) for each in data.find_doubts()]

    assert doubt(table) == []
    same = write_csv(tmp_path / "same.csv", [(f"{number}.png", "a photo") for number in range(5)])
    assert doubt(same) == [
        "data.train: all 5 samples of train have the same caption: nothing says which image one belongs to; type"
        " data.caption=<the right column>, or other data"
    ]
