"""Random crops and flips of images."""

from typing import Any

import pytest
import torch

from recipes.data.augmentation import Augmentation
from recipes.data.draws import rng_at
from recipes.errors import ConfigError

IMAGE = 1 + torch.arange(30.0).reshape(1, 5, 6)  # [1, 5, 6], no zeros


def augmentation(**changes: Any) -> Augmentation:
    return Augmentation(**({"random_crop_padding": 0, "random_horizontal_flip": False, "image_size": 5} | changes))


def test_crops_are_the_windows_of_the_padded_image_equally_often() -> None:
    crop = augmentation(random_crop_padding=1)
    padded = torch.nn.functional.pad(IMAGE, (1, 1, 1, 1))  # [1, 7, 8]
    windows = [padded[:, y : y + 5, x : x + 6] for y in range(3) for x in range(3)]
    drawn = [crop(IMAGE, rng_at(0, position)) for position in range(1800)]
    counts = torch.tensor([sum(torch.equal(image, window) for image in drawn) for window in windows]).double()
    assert counts.sum() == 1800
    assert ((counts - 200) ** 2 / 200).sum() < 26  # chi square, 8 degrees of freedom: once in a thousand seeds


def test_one_image_in_two_is_mirrored() -> None:
    flip = augmentation(random_horizontal_flip=True)
    drawn = [flip(IMAGE, rng_at(0, position)) for position in range(1000)]
    mirrored = sum(torch.equal(image, IMAGE.flip(-1)) for image in drawn)
    assert mirrored + sum(torch.equal(image, IMAGE) for image in drawn) == 1000
    assert abs(mirrored - 500) < 53  # 3.3 standard deviations: once in a thousand seeds


def test_an_image_is_not_changed_in_place() -> None:
    before = IMAGE.clone()
    for position in range(20):
        augmentation(random_crop_padding=4, random_horizontal_flip=True)(IMAGE, rng_at(0, position))
    assert torch.equal(IMAGE, before)


def test_nothing_to_draw_leaves_the_dataset_as_it_is() -> None:
    images: Any = object()
    assert augmentation().of(images) is images
    assert augmentation().describe() == ""


def test_a_crop_that_could_miss_the_image_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        augmentation(random_crop_padding=16, image_size=16)
    assert str(caught.value) == (
        "data.random_crop_padding=16: a crop of 16 x 16 pixels could show nothing but the border;"
        " type data.random_crop_padding=2"
    )
