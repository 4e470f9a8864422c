"""The init_weights of somebody's own model takes the seed and sets every parameter, or the run says what is missing."""

import pytest
import torch
from torch import nn

from recipes.errors import ConfigError
from recipes.model.init import constant_
from recipes.model.weights import initialize


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    def init_weights(self, seed: int) -> None:
        for parameter in self.parameters():
            constant_(parameter, float(seed))

    def init_buffers(self) -> None: ...


class Partial(Whole):
    def init_weights(self, seed: int) -> None:
        constant_(self.body.weight, float(seed))


class Seedless(Whole):
    def init_weights(self) -> None:  # type: ignore[override]  # as people write it
        nn.init.ones_(self.body.weight)


def test_a_model_that_sets_every_parameter_is_left_as_it_sets_them() -> None:
    initialize(model := Whole(), 3)
    assert torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist() == [3.0] * 9


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Partial(), "its init_weights does not set body.bias and 2 more, whose memory holds whatever was there"),
        (Seedless(), "its init_weights takes no seed alone"),
    ],
)
def test_what_is_missing_is_named(model: nn.Module, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        initialize(model, 3)
