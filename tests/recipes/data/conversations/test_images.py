"""Rows with images to samples: tokens as transformers makes them, no image cut, lost or learned, in any batch."""

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llava_chats import (
    IMAGE_ID,
    IN_ORDER,
    LLAVA,
    NUM_PATCHES,
    SIZE,
    Llava,
    ask,
    encode_image,
    source_of,
    write_images,
    write_rows,
)
from streams import open_stream
from transformed_images import make_transform

from recipes.data.batches import make_padding
from recipes.data.conversations.source import Conversations
from recipes.data.mixture.source import Mixture
from recipes.errors import ConfigError
from recipes.numerics.loss import IGNORE_INDEX
from recipes.tokenizer.bytes import Bytes
from recipes.torchvision_import import repair

pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")


def chats_of(names: list[str], counts: list[int]) -> list[dict[str, Any]]:
    """Return rows with so many images each."""
    return [
        {"messages": ask(f"{number}: how many?", str(count), images=count), "images": names[number : number + count]}
        for number, count in enumerate(counts)
    ]


def explain(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        source_of(folder, rows, **settings)
    return str(caught.value)


def check_batch(batch: dict[str, Any]) -> None:
    """Check that a batch has P tokens of each of its images in its row, and that none of them is learned."""
    num_tokens = (batch["inputs"] == IMAGE_ID).sum(dim=1)
    assert num_tokens.tolist() == (NUM_PATCHES * batch["num_images"]).tolist()
    assert len(batch["images"]) == max(1, int(batch["num_images"].sum()))
    assert batch["images"].dtype == torch.float32
    assert not (batch["targets"] == IMAGE_ID).any()


INTERLEAVED = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Left "},
            {"type": "image"},
            {"type": "text", "text": " or "},
            {"type": "image"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "left"}]},
    {"role": "user", "content": [{"type": "image"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
]


@pytest.mark.parametrize("template", [LLAVA, IN_ORDER], ids=["llava", "in order"])
def test_tokens_and_pixels_are_those_of_the_processor_of_transformers(template: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    repair()
    from PIL import Image
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    Llava().make(None).save(tmp_path / "tokenizer")
    pixels = CLIPImageProcessor(
        size={"shortest_edge": SIZE},
        crop_size={"height": SIZE, "width": SIZE},
        image_mean=[0.5] * 3,
        image_std=[0.25] * 3,
        resample=2,
    )
    processor = LlavaProcessor(
        image_processor=pixels,
        tokenizer=PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    names = write_images(tmp_path, 3)
    chats = [(ask("What?", images=1), 1), (ask("Both?", images=2), 2), (ask("None?"), 0), (INTERLEAVED, 3)]
    samples = source_of(
        tmp_path,
        [{"messages": chat, "images": names[:number]} for chat, number in chats],
        tokenizer=Llava(template),
    ).train()
    for index, (chat, number) in enumerate(chats):
        rest = iter(names)
        opened = [
            {"role": message["role"], "content": [_with_image(part, rest, tmp_path) for part in message["content"]]}
            for message in chat
        ]
        expected = processor.apply_chat_template(opened, tokenize=True, return_dict=True, return_tensors="pt")
        assert samples[index]["inputs"].tolist() == expected["input_ids"][0, :-1].tolist()
        assert samples[index]["images"].shape == (number, 3, SIZE, SIZE)
        if number:  # the same arithmetic in another order
            torch.testing.assert_close(samples[index]["images"], expected["pixel_values"], atol=1e-6, rtol=0)
    assert isinstance(Image.open(tmp_path / names[0]), Image.Image)


def _with_image(part: dict[str, Any], names: Any, folder: Path) -> dict[str, Any]:
    from PIL import Image

    return part if part["type"] == "text" else part | {"image": Image.open(folder / next(names))}


@pytest.mark.parametrize("tokenizer", [Bytes(), Llava(None)], ids=["bytes", "one that knows the token"])
def test_a_template_of_texts_has_the_image_in_a_line_before_the_question(tokenizer: Any, tmp_path: Path) -> None:
    names = write_images(tmp_path, 1)
    source = source_of(tmp_path, chats_of(names, [1]), tokenizer=tokenizer, chat_template="chatml")
    tokens = source.train()[0]["inputs"].tolist()
    assert tokens.count(IMAGE_ID) == NUM_PATCHES
    assert "user\n<image>\n0: how many?" in source.describe_sample(0)["text"]


@pytest.mark.parametrize("template", ["chatml", "auto"])
def test_an_image_that_somebody_only_typed_is_text(template: str, tmp_path: Path) -> None:
    write_images(tmp_path, 1)
    typed = [{"messages": ask("What does <image> mean?", "<image> is a word")}]
    one = {"messages": ask("Is <image> red?", images=1), "images": ["0.png"]}
    source = source_of(tmp_path, [*typed, one], chat_template=template)
    first, second = (source.train()[index]["inputs"].tolist() for index in (0, 1))
    assert (first.count(IMAGE_ID), second.count(IMAGE_ID)) == (0, NUM_PATCHES)
    assert source.describe_sample(0)["text"].count("<image>") == 2
    assert source.describe_sample(1)["text"].count("<image>") == 2


def test_a_text_with_the_token_of_images_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "completion": "d"}]
    said = explain(tmp_path, rows, tokenizer=Bytes(), image_token_id=ord("b"))
    assert "rows.jsonl:1: model.image_token_id=98: its text has the token 'b', which the model takes for images" in said


def test_a_template_that_shows_not_all_images_is_refused(tmp_path: Path) -> None:
    names = write_images(tmp_path, 2)
    first = LLAVA.replace("{{ '<image>\\n' }}", "{% if loop.first %}{{ '<image>\\n' }}{% endif %}")
    said = explain(tmp_path, [{"messages": ask("a", images=2), "images": names}], tokenizer=Llava(first))
    assert "shows 1 of its 2 images" in said


@pytest.mark.parametrize("train_on", ["answers", "last_answer", "all"])
@pytest.mark.parametrize("packing", [False, True])
def test_no_image_token_is_a_target(train_on: str, packing: bool, tmp_path: Path) -> None:
    names = write_images(tmp_path, 8)
    source = source_of(tmp_path, chats_of(names, [1, 0, 2, 3, 1]), train_on=train_on, packing=packing)
    assert source.collate is not None
    rows = source.train()
    batch = source.collate([rows[index] for index in range(len(rows))])
    check_batch(batch)
    assert int(batch["num_images"].sum()) == 7
    assert rows.count_images is not None
    assert rows.count_images(np.arange(len(rows))).tolist() == batch["num_images"].tolist()
    num_learned = int((batch["targets"] != IGNORE_INDEX).sum())
    assert num_learned == rows.num_targets
    if train_on == "all":  # all but the images, and the first token of each example
        num_inputs = int(batch["num_inputs"].sum())
        assert num_learned == num_inputs - 7 * NUM_PATCHES


@pytest.mark.parametrize("packing", [False, True])
def test_rows_that_are_cut_end_before_an_image_and_read_as_many_images_as_tokens(packing: bool, tmp_path: Path) -> None:
    names = write_images(tmp_path, 4)
    chat = ask("a", "b" * 20, images=1) + ask("c", "d", images=2)
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": chat, "images": names[:3]}])
    whole = source_of(tmp_path, path, packing=packing).train()[0]
    first = whole["inputs"].tolist().index(IMAGE_ID)
    starts = [place for place, token in enumerate(whole["inputs"].tolist()) if token == IMAGE_ID][::NUM_PATCHES]
    for seq_len in range(starts[1] - 1, starts[2] + NUM_PATCHES + 2):
        source = source_of(tmp_path, path, packing=packing, seq_len=seq_len)
        assert source.collate is not None
        row = source.train()[0]
        batch = source.collate([row])
        check_batch(batch)
        num_inputs = int(batch["num_inputs"])
        num_whole = sum(start + NUM_PATCHES <= seq_len for start in starts)
        cut = [start for start in starts if start < seq_len < start + NUM_PATCHES]
        assert (len(row["images"]), num_inputs) == (num_whole, cut[0] if cut else seq_len)
        assert batch["inputs"][0, :num_inputs].tolist() == whole["inputs"][:num_inputs].tolist()
        assert torch.equal(row["images"], whole["images"][:num_whole])
        assert source.train().num_images_cut == 3 - num_whole
        assert source.train().count_inputs(np.array([0])).tolist() == [num_inputs]
        assert source.train().count_images(np.array([0])).tolist() == [num_whole]
        said = f", and {2 * (3 - num_whole)} more behind the end of rows that are cut"
        assert (said in source.describe()) == (num_whole < 3)
    assert first == starts[0]


def test_an_image_behind_the_cut_is_not_loaded(tmp_path: Path) -> None:
    names = write_images(tmp_path, 2)
    chat = ask("a", "b" * 20, images=1) + ask("c", images=1)
    source = source_of(tmp_path, [{"messages": chat, "images": names}], seq_len=50)
    (tmp_path / names[1]).unlink()
    assert len(source.train()[0]["images"]) == 1
    (tmp_path / names[0]).write_bytes(encode_image(0)[:90])  # its header is whole
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:1, .*/0\.png: it is damaged: .*; type another copy of the image"
    ):
        source.train()[0]


def test_packed_rows_hold_the_same_examples_and_images_as_unpacked_ones(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", chats_of(write_images(tmp_path, 12), [1, 0, 2, 3, 1, 0, 1, 2]))
    packed, single = (source_of(tmp_path, path, packing=packing).train() for packing in (True, False))
    assert len(packed) < len(single)
    for index in range(len(packed)):
        row, examples = packed[index], packed.examples_of(index)
        alone = [single[example] for example in examples]
        num_inputs = int(row["num_inputs"])
        for name in ("inputs", "targets"):
            assert row[name][:num_inputs].tolist() == torch.cat([each[name] for each in alone]).tolist()
        assert torch.equal(row["images"], torch.cat([each["images"] for each in alone]))
        lengths = [len(each["inputs"]) for each in alone]
        assert row["positions"][:num_inputs].tolist() == [place for length in lengths for place in range(length)]


def test_every_batch_has_the_same_keys_also_one_without_images(tmp_path: Path) -> None:
    source = source_of(tmp_path, chats_of(write_images(tmp_path, 9), [0, 2, 0, 0, 1, 3]))
    assert source.collate is not None
    rows = source.train()
    kinds = [source.collate([rows[index] for index in chosen]) for chosen in ([0, 2], [1, 2], [4], [5, 1, 0])]
    assert {tuple(sorted(batch)) for batch in kinds} == {("images", "inputs", "num_images", "num_inputs", "targets")}
    assert [batch["num_images"].tolist() for batch in kinds] == [[0, 0], [2, 0], [1], [3, 2, 0]]
    assert torch.equal(kinds[0]["images"], torch.zeros(1, 3, SIZE, SIZE)), "which no token reads"
    for batch in kinds:
        check_batch(batch)
    check_batch(source.collate([make_padding(rows), rows[1]]))


@pytest.mark.parametrize("packing", [False, True])
def test_a_resumed_stream_has_the_same_images_with_any_number_of_loader_processes(
    packing: bool, tmp_path: Path
) -> None:
    names = write_images(tmp_path, 24)
    source = source_of(tmp_path, chats_of(names, [number % 3 for number in range(22)]), packing=packing, seq_len=80)
    whole = open_stream(source, micro_batch_size=2)[1]
    expected = [next(whole) for _ in range(6)]
    for num_workers in (0, 2):
        resumed = open_stream(source, micro_batch_size=2, position=6, num_workers=num_workers)[1]
        for batch in expected[3:]:
            found = next(resumed)
            check_batch(found)
            for name in ("inputs", "targets", "images", "num_images", "num_inputs"):
                assert torch.equal(found[name], batch[name])


def mixture_of(**sources: Conversations) -> Mixture:
    weights = dict.fromkeys(sources, 0.5)
    return Mixture(sources=sources, weights=weights, stages=[], max_epochs=None, seq_len=256)


def test_a_mixture_with_text_has_images_in_every_batch(tmp_path: Path) -> None:
    own = {"tokenizer": Llava(IN_ORDER), "val_path": None, "val_fraction": 0.3}
    with_images = source_of(tmp_path, chats_of(write_images(tmp_path, 22), [1, 2] * 10), **own)
    (tmp_path / "text").mkdir()
    text = source_of(tmp_path / "text", [{"messages": ask(f"{n}?")} for n in range(20)], image_token_id=None, **own)
    assert "images" not in text.train()[0]
    mixture = mixture_of(text=text, images=with_images)
    mixture.prepare()
    train, val, first = mixture.train(), mixture.val(), len(text.train())
    batches = [mixture.collate([train[index] for index in chosen]) for chosen in ([0, 1], [0, first, first + 1])]
    batches += [mixture.collate([val[index] for index in range(len(val))]), mixture.collate([val.padding()])]
    assert len({tuple(sorted(batch)) for batch in batches}) == 1
    assert [int(batch["num_images"].sum()) > 0 for batch in batches] == [False, True, True, False]
    for batch in batches:
        check_batch(batch)
    assert train.count_images is not None
    for samples, batch in zip(([0, 1], [0, first, first + 1]), batches, strict=False):
        assert train.count_images(np.array(samples)).tolist() == batch["num_images"].tolist()
    images, prompts = mixture.question_images(6), mixture.questions(6)
    assert [NUM_PATCHES * len(each) for each in images] == [prompt.count(IMAGE_ID) for prompt, _ in prompts]
    assert sum(map(len, images)) > 0


def test_sources_with_images_of_two_shapes_do_not_mix(tmp_path: Path) -> None:
    rows = chats_of(write_images(tmp_path, 20), [1] * 20)
    small, large = (
        source_of(tmp_path, rows, transform=make_transform(size=size, eval_crop=1.0), val_path=None) for size in (8, 16)
    )
    with pytest.raises(ConfigError, match="images of 3x8x8 and 3x16x16, and a model reads one shape"):
        mixture_of(small=small, large=large).prepare()


def test_questions_come_with_their_images(tmp_path: Path) -> None:
    source = source_of(tmp_path, chats_of(write_images(tmp_path, 9), [1, 0, 2]))
    prompts = [prompt for prompt, _ in source.questions(3)]
    images = source.question_images(3)
    assert [prompt.count(IMAGE_ID) for prompt in prompts] == [NUM_PATCHES, 0, 2 * NUM_PATCHES]
    assert [tuple(each.shape) for each in images] == [(number, 3, SIZE, SIZE) for number in (1, 0, 2)]
    assert torch.equal(images[2], source.val()[2]["images"])


def test_images_in_a_table_are_kept_once_and_read_at_random(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pngs = [encode_image(0), encode_image(1)]
    cells = [[{"bytes": pngs[index], "path": None} for index in chosen] for chosen in ([0], [1, 0], [], [0])]
    columns = {"prompt": [f"{n}?" for n in range(4)], "completion": ["a"] * 4, "images": cells}
    pyarrow.parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet")
    found = source_of(tmp_path, str(tmp_path / "rows.parquet")).train()
    (tmp_path / "a.png").write_bytes(pngs[0])
    (tmp_path / "b.png").write_bytes(pngs[1])
    names = [["a.png"], ["b.png", "a.png"], [], ["a.png"]]
    rows = [{"prompt": f"{n}?", "completion": "a", "images": names[n]} for n in range(4)]
    of_files = source_of(tmp_path, rows).train()
    for index in (2, 3, 1, 0):
        for name in ("inputs", "targets", "images"):
            assert torch.equal(found[index][name], of_files[index][name])
    assert (found._store.folder / "images.bin").stat().st_size == sum(map(len, pngs))


def test_rows_about_one_image_are_in_one_split(tmp_path: Path) -> None:
    names = write_images(tmp_path, 12)
    rows = [{"prompt": f"{n}?", "completion": "a", "image": names[n % 12]} for n in range(48)]
    source = source_of(tmp_path, rows, val_path=None, val_fraction=0.3)
    files = [
        {file for index in range(len(rows)) for of_example in rows.list_images(index) for file in of_example}
        for rows in (source.train(), source.val())
    ]
    assert (len(files[0] | files[1]), files[0] & files[1]) == (12, set())
    assert len(source.val().examples) == 4 * len(files[1])


def test_a_data_set_that_is_moved_with_its_images_keeps_its_splits(tmp_path: Path) -> None:
    found = []
    for place in ("here", "there", "far/away"):
        (tmp_path / place).mkdir(parents=True)
        names = write_images(tmp_path / place, 24)
        rows = [
            {"prompt": "What?", "completion": "a", "image": prefix + name} for name in names for prefix in ("", "./")
        ]
        val = source_of(tmp_path / place, rows, val_path=None, val_fraction=0.5).val()
        found.append([Path(*of_example).name for index in range(len(val)) for of_example in val.list_images(index)])
    assert found == [found[0]] * 3
    assert 0 < len(found[0]) < 48
    assert found[0][::2] == found[0][1::2], "however a row spells the path"


def test_the_fingerprint_changes_with_images_their_tokens_and_what_is_made_of_them(tmp_path: Path) -> None:
    names = write_images(tmp_path, 3)
    (tmp_path / "other").mkdir()
    write_images(tmp_path / "other", 3)
    rows = chats_of(names, [1, 1])
    fingerprints = [
        source_of(tmp_path, each, **settings).fingerprint
        for each, settings in (
            (rows, {}),
            (rows, {}),
            (chats_of(names[1:], [1, 1]), {}),
            (rows, {"image_folder": str(tmp_path / "other")}),
            (rows, {"image_seq_length": 2}),
            (rows, {"transform": make_transform(size=SIZE, eval_crop=0.5)}),
        )
    ]
    assert fingerprints[0] == fingerprints[1]
    assert len({*fingerprints}) == 5


def test_nothing_of_an_image_is_drawn(tmp_path: Path) -> None:
    source = source_of(tmp_path, chats_of(write_images(tmp_path, 1), [1]))
    other = source_of(tmp_path, chats_of(["0.png"], [1]), transform=make_transform(size=SIZE, eval_crop=1.0, flip=1.0))
    assert torch.equal(source.train()[0]["images"], other.train()[0]["images"])
    assert "resized to 8 x 8 as in validation, and nothing of them is drawn" in source.describe()


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ({}, "transform=none: the model reads images, and nothing says what is made of one; type transform=clip"),
        (make_transform(mixup=0.2), "no answer is that to a mixed image"),
        (make_transform(views=2), "one view of it is read; type transform.views=1"),
    ],
    ids=["none", "mixed", "views"],
)
def test_a_transform_that_does_not_suit_questions_is_refused(transform: Any, message: str, tmp_path: Path) -> None:
    assert message in explain(tmp_path, [], transform=transform)


def test_a_dump_names_the_images_of_a_row(tmp_path: Path) -> None:
    source = source_of(tmp_path, chats_of(write_images(tmp_path, 3), [2, 0]), packing=True)
    described = source.describe_sample(0)
    assert described["documents"] == [
        {"name": "rows.jsonl:1", "images": [str(tmp_path / "0.png"), str(tmp_path / "1.png")]},
        {"name": "rows.jsonl:2"},
    ]
    assert described["text"].startswith("<s>USER: <image>\n<image>\n0: how many? ASSISTANT: 2 ")


def odd_images() -> dict[str, bytes]:
    """Return images that decoders know and few people have."""
    from PIL import Image

    def encode(image: Any, kind: str, **settings: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **settings)
        return file.getvalue()

    pixels = np.random.default_rng(0).integers(256, size=(12, 10, 4), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "gray.png": encode(Image.fromarray(pixels[..., 0]), "PNG"),
        "cmyk.jpg": encode(Image.fromarray(pixels, "CMYK"), "JPEG"),
        "transparent.png": encode(Image.fromarray(pixels), "PNG"),
        "turned.jpg": encode(Image.fromarray(pixels[..., :3]), "JPEG", exif=turned),
        "dot.png": encode(Image.fromarray(pixels[:1, :1, :3]), "PNG"),
        "line.png": encode(Image.fromarray(pixels[:1, :, :3]), "PNG"),
    }


def test_images_of_any_mode_and_size_become_one_shape(tmp_path: Path) -> None:
    images = odd_images()
    for name, content in images.items():
        (tmp_path / name).write_bytes(content)
    rows = [{"prompt": f"{name}?", "completion": "a", "images": [name, name]} for name in images]
    samples = source_of(tmp_path, rows).train()
    for index in range(len(rows)):
        assert samples[index]["images"].shape == (2, 3, SIZE, SIZE)
        assert samples[index]["images"].isfinite().all()
        assert torch.equal(*samples[index]["images"]), "the same image twice"


def test_rows_with_images_are_refused_where_the_model_reads_none(tmp_path: Path) -> None:
    rows = chats_of(write_images(tmp_path, 1), [1])
    said = explain(tmp_path, rows, image_token_id=None, transform={})
    assert "model=llava, which reads images" in said


def test_a_tokenizer_is_trained_without_places(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"prompt": "<image>ab", "completion": "c", "image": write_images(tmp_path, 1)[0]}])
    assert isinstance(source, Conversations)
    assert list(source.corpus().texts(100)) == ["ab", "c"]


def test_a_step_logs_no_warning_of_what_the_template_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = write_images(tmp_path, 3)
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        source_of(tmp_path, [{"messages": INTERLEAVED, "images": names}], tokenizer=Llava(LLAVA))
    assert "does not show everything" not in caplog.text
