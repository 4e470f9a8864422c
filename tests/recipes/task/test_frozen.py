"""A frozen model is identified by weights and settings, and its errors name its section of the config."""

from typing import Any

import pytest
import torch
from torch import nn

from recipes.errors import ConfigError
from recipes.task.frozen import Base, FrozenModel, check_frozen_model

TEACHER = Base("t", "0a", settings={"num_layers": 2})


@pytest.mark.parametrize("own", [TEACHER, Base("moved", "0a", settings={"num_layers": 2, "of a later version": 1})])
def test_the_same_weights_are_the_same_model_in_any_folder(own: Base) -> None:
    check_frozen_model("teacher", own, TEACHER.state())
    check_frozen_model("teacher", own, None)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            Base("o", "0b", settings={"num_layers": 2}),
            "resume=… with the weights of o: they have other values than when the run was trained beside t;"
            " type resume=… teacher.pretrained=<folder with the weights as they were>",
        ),
        (
            Base("t", "0a", settings={"num_layers": 3}),
            "resume=… with teacher.num_layers=3: the run was trained beside teacher.num_layers=2;"
            " type resume=… without settings of teacher",
        ),
        (
            Base("7", None, settings={"num_layers": 2}),
            "resume=… with weights drawn from seed=7: the run was trained beside the weights of t;"
            " type resume=… without settings of teacher",
        ),
    ],
)
def test_another_model_is_rejected(own: Base, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_frozen_model("teacher", own, TEACHER.state())
    assert str(raised.value) == message


def test_weights_of_another_seed_are_another_model() -> None:
    with pytest.raises(ConfigError, match="the weights of the teacher were drawn from seed=2"):
        check_frozen_model("teacher", Base("1", None), Base("2", None).state())


def test_errors_of_a_frozen_model_name_its_section() -> None:
    def make() -> nn.Module:
        raise ConfigError("model.rope_theta=5", "model.x is in my/model.pth", "model.rope_theta=1, or model=gpt2")

    with pytest.raises(ConfigError) as raised:
        FrozenModel(section="teacher", make=make).on_meta()
    assert str(raised.value) == (
        "teacher.rope_theta=5: teacher.x is in my/model.pth; type teacher.rope_theta=1, or model@teacher=gpt2"
    )


def test_a_frozen_model_is_built_without_storage() -> None:
    made: Any = FrozenModel(section="teacher", make=lambda: nn.Linear(2, 2)).on_meta()
    assert made.weight.device == torch.device("meta")
