"""Before the first step some samples are tried: what the model and the data do not share is answered there."""

from pathlib import Path

import pytest
from support import composed_config, execute, resolved

from recipes.build import build
from recipes.errors import ConfigError

SMALL = [
    *("trainer.accelerator=cpu", "trainer.max_steps=2", "global_batch_size=4", "eval_samples=4", "save_every=null"),
    *("callbacks=[grad_norm]", "metrics=none", "data=dataset"),
]
ROWS = ["data.train={_target_: dataset_cases.Rows, seed: 1}", "data.val={_target_: dataset_cases.Rows, seed: 2}"]
ROWS += ["data.inputs=x", "data.targets=y", "data.target_kind=values", "task=regression"]
ROWS += ["model._target_=dataset_cases.Perceptron"]
IMAGES = ["model=resnet18", "data.kind=images", "callbacks=[grad_norm]"]
IMAGES += [f"data.{split}={{_target_: dataset_cases.Colored}}" for split in ("train", "val")]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (IMAGES, "model.in_channels=1: the images of the data have 3 channels; type model.in_channels=3"),
        (
            [*IMAGES, "model.in_channels=3", "model.num_classes=3"],
            "model.num_classes=3: it returns 3 outputs, and samples of the data have the class 4 (Target 4 is out of"
            " bounds.); type model.num_classes=5",
        ),
        (
            [*ROWS, "model.num_outputs=3"],
            "model._target_=dataset_cases.Perceptron: it returns 3 outputs, and samples of the data have 1 targets"
            " (outputs [8, 3] and targets [8, 1]: a loss of numbers needs one output per number; set model.num_classes"
            " to their number); type the settings with which it returns 1",
        ),
    ],
)
def test_outputs_that_do_not_fit_the_targets_are_a_mistake(typed: list[str], message: str, tmp_path: Path) -> None:
    run = build(resolved(composed_config(*SMALL, *typed), tmp_path))
    with pytest.raises(ConfigError) as error:
        run.trainer.fit(run.task, datamodule=run.data)
    assert str(error.value) == message


def test_a_loss_of_several_outputs_for_each_target_is_none(tmp_path: Path) -> None:
    typed = [*SMALL, *ROWS, "model.num_outputs=2", "loss._target_=dataset_cases.Likelihood"]
    assert execute(*typed, f"hydra.run.dir={tmp_path / 'run'}") == 0


def test_the_settings_of_the_answer_train(tmp_path: Path) -> None:
    typed = [*SMALL, *IMAGES, "model.in_channels=3", "model.num_classes=5"]
    assert execute(*typed, f"hydra.run.dir={tmp_path / 'run'}") == 0
