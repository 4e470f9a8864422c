"""Random tokens are a function of (seed, index)."""

import numpy as np
import pytest
import torch

from recipes.data.random_tokens import RandomTokens
from recipes.errors import ConfigError


def source(**changes):
    return RandomTokens(**({"vocab_size": 11, "seq_len": 16, "num_samples": 200} | changes))


def test_a_sample_is_the_same_at_every_access():
    first, again = source().train(), source().train()
    assert torch.equal(first[7]["inputs"], again[7]["inputs"])
    assert torch.equal(first[7]["inputs"][1:], first[7]["targets"][:-1])
    assert first[7]["inputs"].tolist() != first[8]["inputs"].tolist()
    assert first[7]["inputs"].tolist() != source(seed=1).train()[7]["inputs"].tolist()


def test_training_and_validation_have_different_noise():
    assert source().train()[0]["inputs"].tolist() != source().val()[0]["inputs"].tolist()
    assert (len(source().train()), len(source().val())) == (200, 64)


def test_tokens_are_uniform_over_the_vocabulary():
    train = source().train()
    tokens = torch.cat([train[i]["inputs"] for i in range(200)]).numpy()
    counts = np.bincount(tokens, minlength=11)
    expected = len(tokens) / 11
    assert len(counts) == 11
    assert ((counts - expected) ** 2 / expected).sum() < 30  # chi square, 10 degrees of freedom


def test_an_index_outside_is_an_index_error():
    with pytest.raises(IndexError):
        source().train()[200]


def test_no_samples_are_rejected_with_the_override():
    with pytest.raises(ConfigError) as caught:
        source(num_samples=0)
    assert str(caught.value) == ("data.num_samples=0: random tokens need at least 1; type data.num_samples=256")
