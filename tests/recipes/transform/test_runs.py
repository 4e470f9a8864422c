"""Runs on mixed images: the published recipes at a small size, and a resume with other micro-batches and processes."""

from pathlib import Path

import pytest
from support import RECIPES_OF_IMAGES, execute, read_metrics, write_images

SMALL = (
    *("transform.size=32", "transform.eval_size=32", "trainer.max_steps=1", "global_batch_size=4", "log_every=1"),
    *("eval_every=1", "eval_samples=4", "save_every=null", "precision=32-true", "trainer.accelerator=cpu"),
    *("callbacks=[progress]", "logger=csv", "model.num_classes=2", "warmup_steps=0", "metrics=none"),
)
MODELS = {"resnet50_imagenet": "test_resnet", "convnext_tiny_imagenet": "test_convnext"}


@pytest.mark.parametrize("recipe", RECIPES_OF_IMAGES)
def test_a_recipe_of_images_takes_a_step(recipe: str, tmp_path: Path) -> None:
    model = [f"model.name={MODELS.get(recipe, 'test_vit')}"]
    model += ["model.image_size=32"] if recipe not in MODELS else []
    photos = write_images(tmp_path / "photos", size=40)
    assert execute(f"recipe={recipe}", f"data.path={photos}", *SMALL, *model, f"hydra.run.dir={tmp_path}") == 0
    [row] = read_metrics(tmp_path)
    assert 0.0 < row["train/loss"] < 5.0
    assert 0.0 < row["val/loss"] < 5.0


def test_a_resumed_run_mixes_the_same_pairs_in_other_micro_batches(tmp_path: Path) -> None:
    photos = write_images(tmp_path / "photos", size=40)
    same = ("model=timm", "model.name=test_vit", "model.image_size=32", f"data.path={photos}", *SMALL)
    same += ("transform.mixup=0.8", "transform.cutmix=1.0", "transform.policy=trivialaugment", "transform.erase=0.5")
    same += ("scheduler=constant", "eval_every=4")
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert execute(*same, f"hydra.run.dir={whole}", "trainer.max_steps=4") == 0
    assert execute(*same, f"hydra.run.dir={part}", "trainer.max_steps=2", "save_every=2") == 0
    others = ("trainer.max_steps=4", "micro_batch_size=2", "loader.num_workers=2", "resume=auto")
    assert execute(*same, f"hydra.run.dir={part}", *others) == 0
    expected, found = (read_metrics(folder) for folder in (whole, part))
    assert len(found) == len(expected) == 4
    for row, other in zip(found, expected, strict=True):
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)
