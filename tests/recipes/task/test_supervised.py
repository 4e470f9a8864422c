"""Before the first step some samples are tried: what the model and the data do not share is answered there."""

from pathlib import Path

import pytest
import torch
from support import composed_config, execute, read_metrics, resolved

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
        (
            [*ROWS, "model.num_inputs=16"],  # as many as it has hidden units: both are in torch's message
            "model.num_inputs=16: the inputs of a sample are [8], and torch says: a and b must have same reduction dim,"
            " but got [8, 8] X [16, 16]; type model.num_inputs=8",
        ),
        (
            [*ROWS, "model._target_=dataset_cases.OfFourInputs"],
            "model._target_=dataset_cases.OfFourInputs: the inputs of a sample are [8], and torch says: a and b must"
            " have same reduction dim, but got [8, 8] X [4, 16]; type a model for such inputs",
        ),
        (
            [*ROWS, "model._target_=dataset_cases.OfTwoTensors"],
            "model._target_=dataset_cases.OfTwoTensors: its forward(rows: torch.Tensor, weights: torch.Tensor) ->"
            " torch.Tensor is called with one tensor, the inputs of a batch: missing a required argument: 'weights';"
            " type def forward(self, inputs) in that class, or a LightningModule with task=lightning, which calls it"
            " itself",
        ),
    ],
)
def test_a_model_that_does_not_fit_the_samples_is_a_mistake(typed: list[str], message: str, tmp_path: Path) -> None:
    run = build(resolved(composed_config(*SMALL, *typed), tmp_path))
    with pytest.raises(ConfigError) as error:
        run.trainer.fit(run.task, datamodule=run.data)
    assert str(error.value) == message


def test_labels_of_a_source_that_does_not_declare_them_are_not_read_as_probabilities(tmp_path: Path) -> None:
    config = composed_config(*SMALL[:-1], "model=resnet18", "loss=bce")
    config["data"] = {"_target_": "loss_cases.UndeclaredLabels", "num_samples": 12}
    config["model"]["num_classes"] = 3
    run = build(resolved(config, tmp_path))
    with pytest.raises(ConfigError) as error:
        run.trainer.fit(run.task, datamodule=run.data)
    assert str(error.value) == (
        "data._target_=loss_cases.UndeclaredLabels: its targets are [3] numbers per sample, and classes are whole"
        ' numbers; type target_kind = "labels" in that class'
    )


def test_a_model_that_reads_values_is_not_tried_without_them(tmp_path: Path) -> None:
    typed = [*SMALL, *ROWS, "model._target_=dataset_cases.ReadingValues"]
    assert execute(*typed, f"hydra.run.dir={tmp_path / 'run'}") == 0


def test_a_loss_without_predictions_is_a_mistake_where_metrics_read_them(tmp_path: Path) -> None:
    typed = [*SMALL, *ROWS, "loss._target_=dataset_cases.Absolute"]
    with pytest.raises(ConfigError) as error:
        build(resolved(composed_config(*typed, "metrics=regression"), tmp_path))
    assert str(error.value) == (
        "loss._target_=dataset_cases.Absolute: metrics.mean_absolute_error compares predictions with targets, and it"
        " has no to_metrics(), which returns them; type metrics=none, or def to_metrics(self, outputs, batch),"
        " returning predictions and targets, in that class"
    )
    build(resolved(composed_config(*typed), tmp_path))


def test_outputs_that_are_no_predictions_are_a_mistake_before_the_first_step(tmp_path: Path) -> None:
    typed = [*SMALL, *ROWS, "model.num_outputs=2", "loss._target_=dataset_cases.Likelihood", "metrics=regression"]
    run = build(resolved(composed_config(*typed), tmp_path))
    with pytest.raises(ConfigError) as error:
        run.trainer.fit(run.task, datamodule=run.data)
    assert str(error.value).startswith(
        "loss._target_=dataset_cases.Likelihood: its to_metrics() fails on what the model returns, outputs [8, 2] and"
        " targets [8, 1]"
    )
    assert run.trainer.global_step == 0


def test_the_outputs_of_a_loss_of_ones_own_are_predicted_values(tmp_path: Path) -> None:
    typed = [*SMALL, *ROWS, "loss._target_=dataset_cases.Cubed", "metrics=regression", "eval_every=2", "eval_samples=4"]
    assert execute(*typed, f"hydra.run.dir={tmp_path}") == 0
    last = read_metrics(tmp_path)[-1]
    assert last["val/mean_absolute_error"] ** 3 <= last["val/loss"], "by Jensen's inequality"


def test_a_loss_of_several_outputs_for_each_target_is_none(tmp_path: Path) -> None:
    typed = [*SMALL, *ROWS, "model.num_outputs=2", "loss._target_=dataset_cases.Likelihood"]
    assert execute(*typed, f"hydra.run.dir={tmp_path / 'run'}") == 0


def test_the_settings_of_the_answer_train(tmp_path: Path) -> None:
    typed = [*SMALL, *IMAGES, "model.in_channels=3", "model.num_classes=5"]
    assert execute(*typed, f"hydra.run.dir={tmp_path / 'run'}") == 0


@pytest.mark.parametrize(("typed", "is_last"), [([], False), (["task.channels_last=true"], True)])
def test_images_lie_as_they_are_on_a_cpu_unless_channels_last_is_set(
    typed: list[str], is_last: bool, tmp_path: Path
) -> None:
    small = ["model=resnet18", "data=digits", "global_batch_size=2", "callbacks=[grad_norm]", "model.in_channels=1"]
    task = build(resolved(composed_config(*small, *typed, "trainer.accelerator=cpu"), tmp_path)).task
    seen: list[bool] = []
    task.model = lambda images: seen.append(images.stride(1) == 1)  # type: ignore[assignment, func-returns-value]
    task.outputs({"inputs": torch.zeros(2, 3, 8, 8)})
    assert seen == [is_last]
