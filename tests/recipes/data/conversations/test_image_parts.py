"""Rows that people have with images give the same text with the same places, or say what to type."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llava_chats import encode_image

from recipes.data.conversations.conversation import Example, Reader
from recipes.data.conversations.image_parts import (
    MARK,
    ImageFinder,
    ImageTokens,
    join_parts,
    split_parts,
)
from recipes.data.image_file import check_header
from recipes.data.read_rows import Row
from recipes.errors import ConfigError

PNG = encode_image(0)
ENCODED = base64.b64encode(PNG).decode()
ANSWER = {"role": "assistant", "content": "red"}
QUESTION = f"{MARK}\nWhat is it?"


def read(row: dict[str, Any], *, from_table: bool = False, reads_images: bool = True, **fields: str | None) -> Example:
    reader = Reader(format=None, fields=fields, reads_images=reads_images, way_to_images="model=llava")
    return reader.read(row, place="a.jsonl:1", from_table=from_table)


def texts_of(example: Example) -> list[str]:
    assert not isinstance(example.prompt, str)
    assert not isinstance(example.answer, str)
    return [message["content"] for message in [*(example.prompt or []), *example.answer]]


def explain(row: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(row, **settings)
    return str(caught.value)


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}, ANSWER]} | fields


TEXT = {"type": "text", "text": "What is it?"}


@pytest.mark.parametrize(
    "row",
    [
        chat({"type": "image", "image": "a.png"}, TEXT),
        chat({"type": "image", "path": "a.png"}, TEXT),
        chat({"type": "image", "url": "file:///b/../a.png"}, TEXT),
        chat({"type": "image_url", "image_url": {"url": "a.png"}}, TEXT),
        chat({"type": "image"}, TEXT, images=["a.png"]),
        chat({"type": "image"}, TEXT, image="a.png"),
        chat({"type": "image"}, TEXT, images='["a.png"]'),
        {"messages": [{"role": "user", "content": "<image>\nWhat is it?"}, ANSWER], "images": ["a.png"]},
        {"messages": [{"role": "user", "content": "What is it?"}, ANSWER], "images": ["a.png"]},
        {
            "image": "a.png",
            "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "red"}],
        },
        {"instruction": "What is it?", "input": "", "output": "red", "image": ["a.png"]},
        {"prompt": [{"role": "user", "content": "What is it?"}], "completion": [ANSWER], "images": ["a.png"]},
    ],
    ids=range(12),
)
def test_each_format_gives_the_same_places(row: dict[str, Any]) -> None:
    example = read(row)
    assert texts_of(example) == [QUESTION, "red"]
    assert [Path(str(image)).name for image in example.images] == ["a.png"]


@pytest.mark.parametrize(("prompt", "expected"), [("What?", f"{MARK}\nWhat?"), ("Is <image> red?", f"Is {MARK} red?")])
def test_a_text_prompt_has_its_image_at_its_place_or_before_it(prompt: str, expected: str) -> None:
    example = read({"prompt": prompt, "completion": "<image>", "image": "a.png"})
    assert (example.prompt, example.answer, example.images) == (expected, "<image>", ("a.png",))


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        {"bytes": PNG, "path": "a.png"},
        ENCODED,
        {"base64": ENCODED},
        {"url": f"data:image/png;base64,{ENCODED}"},
        f"data:image/png;base64,{ENCODED}",
        {"bytes": ENCODED, "path": None},
    ],
    ids=range(7),
)
@pytest.mark.parametrize("from_table", [True, False])
def test_an_image_inside_of_a_row_is_read_as_bytes(value: Any, from_table: bool) -> None:
    assert read({"prompt": "a", "completion": "b", "image": value}, from_table=from_table).images == (PNG,)


def test_null_from_a_table_is_no_image() -> None:
    row = {"prompt": "<image>", "completion": "b", "images": [None, {"bytes": None, "path": None}], "image": None}
    example = read(row, from_table=True)
    assert (example.prompt, example.images) == ("<image>", ()), "what someone typed"
    assert read(row | {"images": []}, from_table=True).images == ()


def test_a_null_among_images_is_refused() -> None:
    """The text may speak of the one that is missing, and those after it would take its place."""
    for null in (None, {"bytes": None, "path": None}):
        with pytest.raises(ConfigError, match="one of its images is null"):
            read({"prompt": "<image><image>", "completion": "b", "images": [null, "b.png"]}, from_table=True)


def test_an_image_beside_a_text_is_refused_and_not_left_out() -> None:
    with pytest.raises(ConfigError, match="it has image beside its text") as caught:
        read({"image": "a.png", "text": "a red cat"})
    assert '{"prompt": "<image>", "completion": <the text>, "image": …}' in caught.value.fix


def test_a_question_an_answer_and_an_image_are_a_row() -> None:
    example = read({"image": "a.png", "question": "What?", "answer": "red"})
    assert (example.prompt, example.answer, example.images) == (f"{MARK}\nWhat?", "red", ("a.png",))


def test_parts_of_openai_responses_are_read() -> None:
    asked = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": "a.png"}]
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "red"}]}
    example = read({"messages": [{"role": "user", "content": asked}, answer]})
    assert (texts_of(example), example.images) == ([f"What?\n{MARK}", "red"], ("a.png",))


def test_places_of_several_images_keep_their_order() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    rows = [{"role": "user", "content": parts}, ANSWER, {"role": "user", "content": [{"type": "image"}]}, ANSWER]
    example = read({"messages": rows, "images": ["a", "b", "c"]})
    assert texts_of(example) == [f"{MARK}\nor\n{MARK}", "red", MARK, "red"]
    assert example.images == ("a", "b", "c")


@pytest.mark.parametrize(
    "parts",
    [["a"], [MARK], [MARK, MARK], [MARK, "a"], ["a\n", MARK], [MARK, "\na", MARK, "b", MARK, MARK], [MARK, "\n"]],
)
def test_parts_survive_as_text(parts: list[str]) -> None:
    assert [part.get("text", MARK) for part in split_parts(join_parts(parts))] == parts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat({"type": "image"}, TEXT), "it has 0 images, and 1 parts of type image without one"),
        (chat({"type": "image"}, TEXT, images=["a", "b"]), "it has 2 images, and 1 parts"),
        (chat({"type": "image", "image": "a"}, TEXT, images=["a"]), "it has 1 images, and 0 times <image>"),
        ({"prompt": "<image> <image>", "completion": "b", "image": "a"}, "it has 1 images, and 2 times <image>"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image"}]}]},
            "an answer of the assistant has an image, and images are read, not written",
        ),
        (chat({"type": "image", "image": "https://x.org/a.png"}), "nothing is downloaded while it trains; type the im"),
        ({"prompt": "a", "completion": "b", "image": "s3://x/a.png"}, "is the address s3://x/a.png"),
        (
            {"prompt": "a", "completion": "b", "image": "data:image/svg+xml,<svg/>"},
            "is data:image/svg+xml, and not base64",
        ),
        ({"prompt": "a", "completion": "b", "image": 3}, "one of its images is a number"),
        ({"prompt": "a", "completion": "b", "image": "a", "images": ["b"]}, "it has a field images and another one"),
        ({"prompt": "a", "completion": "b", "videos": ["a.mp4"]}, "it has videos, and text and images are read"),
        (chat({"type": "video", "video": "a"}), "has a part of type video, and text and images are read"),
        ({"messages": [{"role": "user", "content": "a", "images": ["a"]}, ANSWER]}, "images are in the parts of its"),
        ({"messages": [ANSWER], "images": ["a"]}, "no message of a user that they belong to"),
    ],
    ids=range(14),
)
def test_a_row_whose_images_have_no_place_says_what_is_wrong(row: dict[str, Any], message: str) -> None:
    assert message in explain(row)


@pytest.mark.parametrize(
    "row", [chat({"type": "image", "image": "a"}), {"prompt": "a", "completion": "b", "image": "a"}]
)
def test_without_a_model_of_images_a_row_with_one_is_refused(row: dict[str, Any]) -> None:
    assert "only text is trained on; type model=llava, " in explain(row, reads_images=False)


def test_images_that_are_left_out_leave_their_text() -> None:
    example = read({"prompt": "<image>", "completion": "b", "images": ["a"]}, images=None)
    assert (example.prompt, example.images) == ("<image>", ())


def find(image: str | bytes, beside: Path, *, folder: Path | None = None) -> str:
    row = Row("rows.jsonl:3", {}, path=beside / "rows.jsonl")
    try:
        return ImageFinder(None if folder is None else str(folder), check_header).find(image, row).path
    except ConfigError as error:
        return str(error)


def test_paths_are_those_of_the_rows_or_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "b.png").write_bytes(PNG)
    assert find("a.png", tmp_path) == str(tmp_path / "a.png")
    assert find("b.png", tmp_path, folder=tmp_path / "images") == str(tmp_path / "images" / "b.png")
    assert find(str(tmp_path / "a.png"), tmp_path, folder=Path("/elsewhere")) == str(tmp_path / "a.png")
    said = find("b.png", tmp_path)
    assert said.startswith("rows.jsonl:3: its image is b.png: there is no such file or folder; paths are relative to")
    assert said.endswith("type data.image_folder=<folder of the images>")


def test_a_file_that_is_no_image_is_found_before_training_by_its_header(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.png").touch()
    assert "it is a folder, not a file" in find(".", tmp_path)
    assert find("text.png", tmp_path).startswith(f"rows.jsonl:3, {tmp_path}/text.png: it is none of BMP, GIF")
    assert "it is empty (0 bytes)" in find("empty.png", tmp_path)
    assert find(b"no image", tmp_path).startswith("rows.jsonl:3: an image in it: it is none of BMP")


def test_an_image_is_not_cut_in_two() -> None:
    tokens, images = np.array([1, 9, 9, 9, 2, 9, 9, 9, 9, 9, 9, 3]), ImageTokens(9, 3)
    ends = [images.shorten(tokens[:length]) for length in range(13)]
    assert ends == [0, 1, 1, 1, 4, 5, 5, 5, 8, 8, 8, 11, 12]
    assert [images.count(tokens[:end]) for end in ends] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3]
