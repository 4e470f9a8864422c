"""The digits: ten classes in a fixed split."""

import sys

import pytest
import torch

from recipes.data.digits import Digits
from recipes.data.draws import rng_at
from recipes.errors import ConfigError


def digits_with(**settings):
    return Digits(**{"random_crop_padding": 0, "random_horizontal_flip": False} | settings)


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn")
    source = digits_with()
    source.prepare()
    return source


def test_images_are_8_by_8_between_0_and_1(digits):
    sample = digits.train()[0]
    assert sample["inputs"].shape == (1, 8, 8)
    assert sample["inputs"].dtype == torch.float32
    assert sample["targets"].dtype == torch.int64
    assert digits.train().images.min() == 0
    assert digits.train().images.max() == 1


def test_a_fifth_is_held_out_and_every_image_is_on_one_side(digits):
    train, val = digits.train(), digits.val()
    assert len(train) + len(val) == 1797
    assert 0.17 < len(val) / 1797 < 0.23
    assert set(val.labels.tolist()) == set(train.labels.tolist()) == set(range(10))


def test_the_split_is_the_same_in_every_run(digits):
    again = digits_with()
    again.prepare()
    assert torch.equal(again.val().images, digits.val().images)
    assert digits.val().labels[:8].tolist() == again.val().labels[:8].tolist()


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError) as caught:
        digits_with().prepare()
    assert str(caught.value) == (
        "data=digits: it needs scikit-learn, which is not installed; type pip install -e '.[digits]'"
    )


def test_augmentation_changes_the_training_samples_and_their_fingerprint_but_no_validation(digits):
    augmented = digits_with(random_crop_padding=1, random_horizontal_flip=True)
    augmented.prepare()
    assert augmented.describe() == f"{digits.describe()}; training draws {augmented.fingerprint.partition('/')[2]}"
    assert augmented.fingerprint == "digits/random_crop_padding=1, random_horizontal_flip=true"
    assert augmented.val_fingerprint == digits.val_fingerprint == digits.fingerprint == "digits"
    assert torch.equal(augmented.val().images, digits.val().images)
    train = augmented.train()
    assert torch.equal(train[3]["inputs"], digits.train()[3]["inputs"])
    drawn = {tuple(train.sample(3, rng_at(0, position))["inputs"].flatten().tolist()) for position in range(100)}
    assert len(drawn) > 9  # of 18
    assert not hasattr(digits.train(), "sample")
