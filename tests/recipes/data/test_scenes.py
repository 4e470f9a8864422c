"""Captioned scenes as samples: the same pictures in every run, and nothing unseen in training."""

from typing import Any

import numpy as np
import pytest
from support import composed_config

from recipes.config.instantiate import make
from recipes.data.draws import rng_at
from recipes.data.shapes import draw_picture, is_unseen, read_caption


def _make(*overrides: str) -> Any:
    source = make(composed_config("recipe=clip_scenes", "data.num_scenes=400", *overrides)["data"])
    source.prepare()
    return source


@pytest.fixture(scope="module")
def scenes() -> Any:
    return _make()


def _captions(source: Any, split: str) -> list[str]:
    return [*source._get_split(split).list_texts()]


def test_a_sample_is_the_drawn_picture_with_its_caption(scenes: Any) -> None:
    caption = _captions(scenes, "train")[3]
    pixels = scenes.train().read_pixels(3)  # [C, S, S]
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), draw_picture(read_caption(caption), rng_at(5, 3), 32))
    sample = scenes.train().sample(3, rng_at(1234, 99))
    ids = sample["tokens"][sample["is_token"]].tolist()
    assert scenes.tokenizer.decode(ids[:-1]) == caption
    assert sample["inputs"].shape == (3, 32, 32)


def test_captions_of_training_have_no_unseen_combination_and_those_of_the_validation_have_one(scenes: Any) -> None:
    assert not any(is_unseen(read_caption(caption)) for caption in _captions(scenes, "train"))
    held_out = _captions(scenes, "val")
    assert all(is_unseen(read_caption(caption)) for caption in held_out)
    assert len({*held_out}) == 512


def test_shuffled_captions_are_those_of_other_images_in_training_alone(scenes: Any) -> None:
    control = _make("data.shuffle_captions=true")
    captions, shuffled = _captions(scenes, "train"), _captions(control, "train")
    assert shuffled == captions[1:] + captions[:1]
    assert np.array_equal(scenes.train().read_pixels(5), control.train().read_pixels(5))
    assert _captions(control, "val") == _captions(scenes, "val")
    assert control.fingerprint != scenes.fingerprint
    assert control.val_fingerprint == scenes.val_fingerprint


def test_the_first_pictures_are_the_same_among_more_of_them(scenes: Any) -> None:
    more = _make("data.num_scenes=500")
    assert _captions(more, "train")[:400] == _captions(scenes, "train")
    assert np.array_equal(more.train().read_pixels(399), scenes.train().read_pixels(399))


@pytest.mark.parametrize("split", ["train", "val"])
def test_nothing_but_the_shapes_tells_how_many_there_are(scenes: Any, split: str) -> None:
    """The number of shapes and the brightness were once drawn from the same number, in training alone."""
    pictures = scenes.train() if split == "train" else scenes.val()
    captions = _captions(scenes, split)[:400]
    # one of the four places is empty, and each has a corner of the picture
    backgrounds = [pictures.read_pixels(number)[:, [0, 0, -1, -1], [0, -1, 0, -1]].amin() for number in range(400)]
    correlation = np.corrcoef([float(each) for each in backgrounds], [caption.count(",") for caption in captions])[0, 1]
    assert abs(correlation) < 0.2  # 4 standard errors of 400; it was 0.76
