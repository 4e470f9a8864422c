"""A run keeps the defaults of one's own classes that it was made with, and an edit since then is said in a line."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_recipes as lr
from recipes.config import compose_and_check
from recipes.config.resolved import ResolvedRun
from recipes.config.signature import read_signature
from recipes.run_folder import read_config, read_environment

NET = """
from typing import Literal
from kept_blocks import Block
import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(
        self, lr, width=16, scale: float = 1, name: str = None, sizes=(1, 2), size: tuple[int, int] = 3,
        mode: Literal["a", "b"] | None = "a", **others,
    ):
        super().__init__()
        self.lr, self.model = lr, torch.nn.Sequential(torch.nn.Linear(8, width), Block(), torch.nn.Linear(width, 2))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 8), torch.ones(8, dtype=torch.long)), 4)
"""
BLOCKS = """
from torch import nn


class Block(nn.Module):
    def forward(self, x):
        return x
"""
MODULE = "task.module={_target_: kept_net.Net, lr: 0.1}"
OWN = ("task=lightning", MODULE, "data.module=null", "trainer.max_steps=1", "callbacks=[]")
CLASS = "++task.module._target_=kept_net.Net"


def edit(folder: Path, *changes: tuple[str, str]) -> None:
    for name in ("kept_net.py", "kept_blocks.py"):
        text = (folder / name).read_text()
        for old, new in changes:
            text = text.replace(old, new)
        (folder / name).write_text(text)
    read_signature.cache_clear()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    code = tmp_path_factory.mktemp("code")
    (code / "kept_net.py").write_text(NET)
    (code / "kept_blocks.py").write_text(BLOCKS)
    sys.path.insert(0, str(code))
    yield code
    sys.path.remove(str(code))
    for name in ("kept_net", "kept_blocks"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def run(code: Path) -> Path:
    folder = code / "run"
    lr.compose(*OWN, f"hydra.run.dir={folder}").fit()
    edit(code, ("width=16", "width=24"), ("return x", "return 2 * x"))
    return folder


def compose(*overrides: str) -> ResolvedRun:
    composed, mistakes = compose_and_check(overrides)
    assert mistakes == []
    assert composed is not None
    return composed


def test_a_run_folder_has_the_defaults_that_a_config_can_hold(run: Path) -> None:
    module = {"_target_": "kept_net.Net", "lr": 0.1, "width": 16, "scale": 1, "mode": "a"}
    assert read_config(run)["task"]["module"] == module
    assert {name: [*hashes] for name, hashes in read_environment(run)["own_code"].items()} == {
        "kept_net": ["Net"],
        "kept_blocks": ["Block"],
    }


@pytest.mark.parametrize("resume", ["auto", "folder"])
def test_a_resume_keeps_the_default_of_then_and_says_what_takes_that_of_now(run: Path, resume: str) -> None:
    words = (*OWN, f"hydra.run.dir={run}", "resume=auto") if resume == "auto" else (f"resume={run}", CLASS)
    resolved = compose(*words)
    assert resolved.config["task"]["module"]["width"] == 16
    [line] = resolved.edits
    assert line == (
        "task.module.width stays 16, with which the run was made: the default of kept_net.Net is 24 now,"
        " which ++task.module.width=24 takes"
    )
    typed = compose(*words, "++task.module.width=24")
    assert (typed.config["task"]["module"]["width"], typed.edits) == (24, [])


def test_weights_are_loaded_into_what_they_were_trained_in_and_edits_are_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lr.load(run, CLASS).model[0].out_features == 16  # type: ignore[index, union-attr]
    said = "".join(capsys.readouterr())
    assert "kept_net has been edited since the weights were trained" in said
    assert "kept_blocks has been edited since the weights were trained, so they may compute other: Block\n" in said


def test_weights_of_other_shapes_are_answered_with_what_makes_them_fit(run: Path) -> None:
    with pytest.raises(lr.InvalidConfigError, match=r"or with \+\+task.module.<argument>=<value> where they differ"):
        lr.load(run, CLASS, "++task.module.width=5")


def test_a_default_of_an_argument_that_is_no_more_is_left_out_and_named(run: Path, code: Path) -> None:
    edit(code, (", scale: float = 1", ""), (", **others", ""))
    resolved = compose(f"resume={run}", CLASS)
    assert "scale" not in resolved.config["task"]["module"]
    assert "task.module.scale=1 is left out: kept_net.Net has no such argument any more" in resolved.edits
