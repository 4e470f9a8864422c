"""A model of timm is exported as a folder that timm and lightning_recipes load, with equal outputs."""

import json
from pathlib import Path

import pytest
import torch
from support import execute
from timm_models import make_images

import lightning_recipes as lr
from recipes.config import compose_and_check

RESNET = (
    *("model=timm", "model.name=resnet18", "model.arguments={channels: [8, 16, 16, 16]}", "model.in_channels=1"),
    *("model.num_classes=10", "data=digits", "callbacks=[]"),
    *("trainer.accelerator=cpu", "trainer.max_steps=2", "warmup_steps=0", "global_batch_size=8", "eval_samples=16"),
)


def train(folder: Path, norm: str) -> None:
    assert execute(*RESNET, f"model.norm={norm}", f"hydra.run.dir={folder}") == 0


def test_timm_loads_the_folder_with_the_outputs_of_the_run(tmp_path: Path) -> None:
    import timm

    train(tmp_path / "run", "sync")
    assert execute("mode=export", f"resume={tmp_path / 'run'}") == 0
    folder = tmp_path / "run" / "export"
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    ours, images = lr.load(tmp_path / "run"), make_images(size=8, channels=1)
    assert torch.equal(theirs(images), ours(images))
    assert torch.equal(lr.load(folder)(images), ours(images))
    assert not torch.equal(theirs.bn1.running_mean, torch.zeros(64))
    described = json.loads((folder / "config.json").read_text())
    assert described["architecture"] == "resnet18"
    assert described["num_classes"] == 10
    assert json.loads((folder / "export.json").read_text())["format"] == "timm"
    assert "timm.create_model" in (folder / "README.md").read_text()


def test_what_timm_has_not_is_exported_for_lightning_recipes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", "group")
    assert execute("mode=export", f"resume={tmp_path / 'run'}") == 0
    assert (
        "not for timm: resnet18 has batch norms in timm, and those of model.norm=group here" in capsys.readouterr().out
    )
    images = make_images(size=8, channels=1)
    assert torch.equal(lr.load(tmp_path / "run" / "export")(images), lr.load(tmp_path / "run")(images))


def test_the_format_of_timm_is_refused_for_another_model() -> None:
    _, mistakes = compose_and_check(("mode=export", "mode.format=timm", "model=resnet18", "resume=nowhere"))
    assert any("timm has no ResNet18; type mode.format=auto" in str(mistake) for mistake in mistakes)
