"""Random images and classes are a function of (seed, index)."""

import pickle
from typing import Any

import pytest
import torch

from recipes.data.random_images import RandomImages
from recipes.errors import ConfigError


def source(**changes: Any) -> RandomImages:
    settings = {"num_classes": 10, "in_channels": 3, "image_size": 8, "num_samples": 2000}
    settings |= {"random_crop_padding": 0, "random_horizontal_flip": False, "targets": "classes"}
    return RandomImages(**(settings | changes))


def test_a_sample_is_the_same_at_every_access_and_in_every_loader_process() -> None:
    first = source().train()
    sample = first[7]
    assert sample["inputs"].shape == (3, 8, 8)
    for again in (first, source().train(), pickle.loads(pickle.dumps(first))):
        assert torch.equal(again[7]["inputs"], sample["inputs"])
        assert torch.equal(again[7]["targets"], sample["targets"])


def test_other_indices_seeds_and_splits_have_other_images() -> None:
    images = [source().train()[7], source().train()[8], source(seed=1).train()[7], source().val()[7]]
    assert len({tuple(image["inputs"].flatten().tolist()) for image in images}) == 4


def test_images_have_mean_0_and_variance_1_and_classes_are_uniform() -> None:
    train = source().train()
    samples = [train[i] for i in range(2000)]
    pixels = torch.cat([sample["inputs"].flatten() for sample in samples[:200]])
    # 38,400 pixels: four standard errors of the mean are 0.02, of the variance 0.03
    assert pixels.mean().item() == pytest.approx(0.0, abs=0.02)
    assert pixels.var().item() == pytest.approx(1.0, abs=0.03)
    counts = torch.stack([sample["targets"] for sample in samples]).bincount(minlength=10).double()
    assert len(counts) == 10
    assert ((counts - 200) ** 2 / 200).sum() < 27  # chi square, 9 degrees of freedom: once in a thousand seeds


def test_training_and_validation_share_no_image() -> None:
    train, val = source().train(), source().val()
    images = [{tuple(split[i]["inputs"].flatten().tolist()) for i in range(len(split))} for split in (train, val)]
    assert len(images[1]) == 64
    assert not images[0] & images[1]


def test_an_index_outside_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        source().train()[2000]


def test_no_samples_are_rejected_with_the_override() -> None:
    with pytest.raises(ConfigError) as caught:
        source(num_val_samples=0)
    assert str(caught.value) == ("data.num_val_samples=0: random images need at least 1; type data.num_val_samples=1")
