"""The first experiment learns, and its run comes back as a model. In the folder of this project: pytest."""

from pathlib import Path

import pytest
import torch
from my_project.data import Spirals
from my_project.model import Classifier

import lightning_recipes as lr


@pytest.mark.parametrize("recipe", [file.stem for file in sorted(Path("conf/recipe").glob("*.yaml"))])
def test_the_settings_of_a_recipe_fit_together(recipe: str) -> None:
    assert lr.compose(f"recipe={recipe}").config["name"] == recipe


def test_the_first_experiment_learns_to_tell_the_spirals_apart(tmp_path: Path) -> None:
    run = lr.compose("recipe=first", "trainer.accelerator=cpu", f"hydra.run.dir={tmp_path}/run").fit()
    accuracies = [row["val/accuracy"] for row in run.rows if "val/accuracy" in row]
    assert accuracies[-1] > 0.95, accuracies
    model = lr.load(run.folder)
    assert isinstance(model, Classifier)
    points = Spirals(num_points=300, noise=0.1, seed=3)
    with torch.no_grad():
        right = model(points.points).argmax(dim=1) == points.classes
    assert right.float().mean() > 0.95


def test_a_model_gives_one_logit_per_class() -> None:
    model = Classifier(num_classes=3, width=16, num_layers=1)
    model.init_weights(seed=1)
    assert model(torch.zeros(5, 2)).shape == (5, 3)
