"""Contrastive learning in two passes: one gradient, one update of statistics, and features that a classifier takes."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import composed_config, execute, resolved
from torch import nn

from recipes.build import build
from recipes.config import compose_and_check
from recipes.errors import ConfigError

SMALL = [
    *("trainer.accelerator=cpu", "trainer.max_steps=2", "global_batch_size=8", "micro_batch_size=4", "warmup_steps=0"),
    *("callbacks=[grad_norm]", "eval_every=2", "eval_samples=null", "log_every=1"),
]
OF_VIEWS = ["model=resnet18", "~model.small_images", "data=random_images", "task=contrastive", "task.hidden_size=16"]
PIXELS = ["model=resnet18", "~model.small_images", "model._target_=loss_cases.Pixels", "model.in_channels=3"]


def test_two_passes_have_one_gradient_and_update_statistics_once(tmp_path: Path) -> None:
    config = composed_config(*SMALL, *OF_VIEWS, "model._target_=loss_cases.Drawing", "save_every=null")
    config |= {"data": {"_target_": "loss_cases.TwoViews", "num_samples": 24}}
    config["task"] |= {"_target_": "loss_cases.ContrastingAtOnce"}
    run = build(resolved(config, tmp_path))
    run.trainer.fit(run.task, datamodule=run.data)
    task: Any = run.task
    assert len(task.differences) == 7
    assert max(task.differences) < 1e-5
    assert int(task.model.norm.num_batches_tracked) == 4  # two steps of two micro-batches
    assert isinstance(task.model.head, nn.Identity)


def test_a_classifier_starts_from_the_features(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for index in range(24):
        file = photos / "abc"[index % 3] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 12), (index * 10, 90, 255 - index * 10)).save(file)
    data = [f"data.path={photos}", "data.val_fraction=0.3", "transform.size=8"]
    first = tmp_path / "simclr"
    assert execute("recipe=simclr", *PIXELS, *data, *SMALL, f"hydra.run.dir={first}", "task.hidden_size=16") == 0
    probe = tmp_path / "probe"
    second = [*PIXELS, "task=classification", "data=image_folder", "model.num_classes=3", *data, *SMALL]
    assert execute(*second, f"start_from={first}", f"hydra.run.dir={probe}", 'freeze=["^(?!head)"]') == 0
    said = (probe / "train.log").read_text()
    assert "new: 2 tensors, 99 values: head.weight, head.bias\n" in said
    assert "left out: 4 tensors, 2,704 values: projection" in said


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            ["recipe=simclr", "transform=imagenet"],
            "transform.views=1 task=contrastive: the task reads 2 of each image; type transform=simclr, or"
            " transform.views=2",
        ),
        (
            ["model=timm", "transform=simclr"],
            "transform.views=2 task=classification: the task reads 1 of each image; type transform.views=1, or"
            " recipe=simclr",
        ),
        (
            ["recipe=simclr", "global_batch_size=1"],
            "global_batch_size=1: an image is compared with the others of its global batch; type"
            " global_batch_size=256, or more",
        ),
        (
            ["model=timm", "loss=nt_xent", "metrics=none"],
            "loss=nt_xent task=classification: it compares two views of each image, and this task reads one; type"
            " recipe=simclr, or another loss",
        ),
        (
            ["recipe=simclr", "loss=cross_entropy"],
            "loss=cross_entropy task=contrastive: it does not compare the views of an image; type loss=nt_xent",
        ),
        (
            ["recipe=simclr", "loss.temperature=0"],
            "loss.temperature=0: it must be above 0; type loss.temperature=<above 0>",
        ),
    ],
)
def test_what_cannot_be_compared_is_a_mistake_of_the_config(typed: list[str], message: str) -> None:
    _, mistakes = compose_and_check([*typed, "data.path=/photos", "trainer.max_steps=3", "trainer.accelerator=cpu"])
    assert [str(mistake) for mistake in mistakes if "/photos" not in str(mistake)] == [message]


def test_data_with_one_view_is_a_mistake_before_the_first_step(tmp_path: Path) -> None:
    config = composed_config(*SMALL, *OF_VIEWS, "model._target_=loss_cases.Pixels", "save_every=null")
    run = build(resolved(config, tmp_path))
    with pytest.raises(ConfigError, match=r"inputs \[1, 224, 224\], and \[2, …\] are the two views.*transform=simclr"):
        run.trainer.fit(run.task, datamodule=run.data)


def test_a_projection_is_not_exported() -> None:
    _, mistakes = compose_and_check(["recipe=simclr", "mode=export", "data.path=/photos"])
    reason = "mode=export task=contrastive: a projection is of use to its loss alone; type task=classification"
    assert f"{reason} start_from=<that run>, and mode=export of the new one" in map(str, mistakes)
