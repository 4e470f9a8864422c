"""Letters of fonts: a class for each letter, and validation on fonts that training never draws."""

import pytest
import torch
from support import composed_config

from recipes.config.instantiate import make
from recipes.data.draws import rng_at


@pytest.fixture(scope="module")
def letters():
    return make_letters()


def make_letters(*overrides):
    source = make(composed_config("recipe=vision_quickstart", *overrides)["data"])
    source.prepare()
    return source


def test_six_fonts_train_and_nine_others_validate_each_with_26_letters(letters):
    train, val = letters.train(), letters.val()
    assert (len(train), len(val)) == (6 * 26, 9 * 26)
    assert [int(train[index]["targets"]) for index in range(26)] == list(range(26))
    assert {int(val[index]["targets"]) for index in range(len(val))} == set(range(26))


def test_no_image_of_validation_is_one_of_training(letters):
    train, val = (
        [split[index]["inputs"].numpy().tobytes() for index in range(len(split))]
        for split in (letters.train(), letters.val())
    )
    assert len(set(train)) > 150, "fonts differ from each other"
    assert set(train).isdisjoint(val)


def test_a_sample_is_drawn_of_seed_and_position_alone(letters):
    train = letters.train()
    first, again, other = (train.sample(3, rng_at(7, position))["inputs"] for position in (10, 10, 11))
    assert first.shape == (1, 28, 28)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_shuffled_labels_say_nothing_of_the_letter_and_are_another_training_set(letters):
    shuffled = make_letters("data.shuffle_labels=true")
    labels = [int(shuffled.train()[index]["targets"]) for index in range(156)]
    agree = sum(label == index % 26 for index, label in enumerate(labels)) / 156
    assert agree < 0.15, "1 in 26 by chance"
    assert [int(shuffled.val()[index]["targets"]) for index in range(26)] == list(range(26))
    assert shuffled.fingerprint != letters.fingerprint
    assert shuffled.val_fingerprint == letters.val_fingerprint
