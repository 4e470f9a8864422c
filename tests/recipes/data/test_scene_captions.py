"""Questions about scenes: answers by program, key words in the place of images, and what is held out."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipes.data.draws import rng_at
from recipes.data.scene_captions import SceneCaptions, SceneRows, write_key_words
from recipes.data.shapes import choose_seen, choose_unseen, draw_picture, is_unseen, read_caption
from recipes.tokenizer.bytes import Bytes

SETTINGS: dict[str, Any] = {
    "questions": ["what", "color", "count"],
    "image_size": 32,
    "as_text": True,
    "shuffles_words": True,
    "shuffles_answers": False,
}


def _read(split: str, number: int, **settings: Any) -> list[dict[str, Any]]:
    return [dict(row.content) for row in SceneRows(split, number, **SETTINGS | settings)]


def _source(folder: Path, **settings: Any) -> SceneCaptions:
    common: dict[str, Any] = {"chat_template": "auto", "tokenizer": Bytes(), "seq_len": 256, "cache_dir": str(folder)}
    common |= {"questions": ["what"], "num_scenes": 300, "image_size": 32, "num_processes": 1, "train_on": "answers"}
    common |= {"as_text": True, "shuffle_words": True, "shuffle_answers": False, "packing": True}
    common |= {"image_token_id": None, "image_seq_length": None, "transform": {}}
    return SceneCaptions(**common | settings)


@pytest.mark.parametrize("split", ["train", "val"])
def test_each_answer_is_the_one_that_the_scene_gives(split: str) -> None:
    scenes = choose_seen(300) if split == "train" else choose_unseen(300)
    asked = set()
    for scene, row in zip(scenes, _read(split, 300), strict=True):
        words, question = row["prompt"].split("\n")
        assert sorted(words.replace(";", "").split()) == sorted(" ".join(map(" ".join, scene)).split())
        asked.add(question)
        if question == "What is there?":
            assert read_caption(row["completion"]) == scene
        elif question == "How many shapes are there?":
            assert row["completion"] == {1: "one", 2: "two", 3: "three"}[len(scene)]
        else:
            place = question.removeprefix("What color is the shape at the ").removesuffix("?")
            assert [row["completion"]] == [shape.color for shape in scene if shape.place == place]
    assert len(asked) == 6, "colors at four places"


def test_key_words_in_any_order_keep_those_of_a_shape_together() -> None:
    scene = read_caption("red circle top left, blue square bottom right")
    found = {write_key_words(scene, rng_at(0, number)) for number in range(500)}
    assert len(found) == 2 * 6 * 6
    assert {"circle top left red; square bottom right blue", "bottom right square blue; red circle top left"} <= found
    assert write_key_words(scene, None) == "red circle top left; blue square bottom right"


def test_rows_with_images_have_the_pictures_of_the_captioned_scenes() -> None:
    for split, seed, scenes in (("train", 5, choose_seen(9)), ("val", 6, choose_unseen(9))):
        for number, row in enumerate(_read(split, 9, as_text=False)):
            assert row["prompt"].startswith("<image>\n")
            pixels = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))  # [32, 32, 3]
            assert np.array_equal(pixels, draw_picture(scenes[number], rng_at(seed, number), 32))


def test_rows_with_images_ask_and_answer_as_those_with_key_words() -> None:
    words, images = _read("val", 60), _read("val", 60, as_text=False)
    for one, other in zip(words, images, strict=True):
        assert one["prompt"].partition("\n")[2] == other["prompt"].partition("\n")[2]
        assert one["completion"] == other["completion"]


def test_shuffled_answers_are_those_of_the_next_scene_that_is_asked_the_same() -> None:
    right, control = _read("train", 60), _read("train", 60, shuffles_answers=True)
    assert [row["prompt"] for row in control] == [row["prompt"] for row in right]
    answers = [row["completion"] for row in right]
    assert [row["completion"] for row in control] == answers[3:] + answers[:3]


def test_the_validation_asks_about_unseen_scenes_only(tmp_path: Path) -> None:
    source = _source(tmp_path)
    source.hold_out_all()
    source.prepare()
    answers = [source.tokenizer.decode(answer[:-1]) for _, answer in source.questions(512)]
    assert len({*answers}) == 512
    assert all(is_unseen(read_caption(answer)) for answer in answers)
    assert "300 training" in source.describe()
    trained = "".join(source.describe_sample(index)["text"] for index in range(len(source.train())))
    assert not any(f"\nWhat is there?{answer}\n" in trained for answer in answers)


def test_no_kind_of_question_or_an_unknown_one_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.questions=\[\]: .*type data\.questions=\[what,color,count\]"):
        _source(tmp_path, questions=[])
    with pytest.raises(ValueError, match="there is no question where"):
        _source(tmp_path, questions=["where"])
