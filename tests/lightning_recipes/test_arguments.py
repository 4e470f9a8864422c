"""What people pass to the functions of Python is taken as it is meant, or answered with what to type."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
from torch import nn

import lightning_recipes as lr
from lightning_recipes.arguments import find_best, find_run, read_overrides
from recipes.errors import ConfigError


class Net(nn.Module):
    """Of a file."""


class Module(lightning.LightningModule):
    """Of a file, too."""


def fix(*arguments: Any, call: str = "compose", **named: Any) -> str:
    """Return what the mistake in a call says to type."""
    with pytest.raises(ConfigError) as caught:
        read_overrides(call, arguments, named)
    return caught.value.fix


def test_lists_quoted_texts_and_pasted_commands_are_overrides() -> None:
    assert read_overrides("compose", (["model=gpt2", "seed=3"], "name=x"), {}) == ["model=gpt2", "seed=3", "name=x"]
    assert read_overrides("compose", ("'trainer.max_steps=10'",), {}) == ["trainer.max_steps=10"]
    assert read_overrides("compose", ("mode.prompt='a b'",), {}) == ["mode.prompt='a b'"]
    for program in ("python train.py", "!python train.py", "lightning-recipes", "python -m lightning_recipes"):
        assert read_overrides("compose", (f"{program} model=gpt2 'name=a b'",), {}) == ["model=gpt2", "name=a b"], (
            program
        )


def test_a_class_or_an_object_is_answered_with_the_name_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    of_cell = '%%writefile mine.py as the first line of its cell, and then "model._target_=mine.Cell"'
    cell: Any = type("Cell", (nn.Module,), {"__module__": "__main__"})
    assert [fix(cell), fix(cell()), fix(model=cell())] == [of_cell] * 3
    assert [fix("model._target_=__main__.Cell"), fix(f"model._target_={cell}")] == [of_cell] * 2
    assert read_overrides("compose", ("model._target_=Cell",), {}), "nobody has defined it"
    monkeypatch.setattr(sys.modules["__main__"], "Cell", cell, raising=False)
    assert [fix("model._target_=Cell"), fix("model={_target_: Cell, width: 3}")] == [of_cell] * 2
    assert read_overrides("compose", ("model._target_=mine.Cell",), {}) == ["model._target_=mine.Cell"]
    own: Any = type("Own", (lightning.LightningModule,), {"__module__": "__main__"})
    assert fix(own()).endswith('and then "task=lightning", "task.module._target_=mine.Own"')
    assert fix(Net()) == f'"model._target_={__name__}.Net"'
    assert fix(Module()) == f'"task=lightning", "task.module._target_={__name__}.Module"'
    assert fix(1) == 'compose("model=gpt2")'
    assert fix(model="llama_8b") == 'compose("model=llama_8b")'
    assert fix(call="plan", hardware="h100x8") == 'plan("plan.hardware=h100x8")'
    with pytest.raises(AttributeError, match=r"type: lr\.compose\(.*\)\.fit\(\)"):
        _ = lr.fit  # type: ignore[attr-defined]


def test_what_is_no_run_is_answered_with_runs_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def answer(call: str, path: Any) -> tuple[str, str]:
        with pytest.raises(ConfigError) as caught:
            find_run(call, path)
        return caught.value.reason, caught.value.fix

    assert answer("load", "nothing") == ("there is no such folder", "load(<a run folder>)")
    run = Path("logs/lm/one")
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "metrics.csv").touch()
    assert answer("load", "nothing") == ("there is no such folder", "load('logs/lm/one')")
    assert answer("read", Path("logs")) == ("there is no run in this folder, but a run below it", "read('logs/lm/one')")
    assert answer("read", run / "metrics.csv")[1] == "read('logs/lm/one')"
    assert find_run("load", lr.RecordedRun(folder=run, rows=[], events=[], summary={}, config={})) == run
    with pytest.raises(ConfigError, match="no best checkpoint"):
        find_best(run)
    (run / "checkpoints/step_0000001.ckpt").mkdir()
    (run / "checkpoints/best").symlink_to("step_0000001.ckpt")
    assert find_best(run / "checkpoints/step_0000001.ckpt") == run / "checkpoints/best"


def test_an_option_that_was_typed_in_another_group_is_named_with_its_own() -> None:
    for typed, type_this in [
        ("recipe=gpt2", "model=gpt2"),
        ("model=digits", "data=digits"),
        ("data=gpt2", "model=gpt2"),
    ]:
        with pytest.raises(lr.InvalidConfigError) as caught:
            lr.compose(typed)
        assert str(caught.value).endswith(f"type: {type_this}"), typed


def test_the_package_is_a_command_that_names_itself(tmp_path: Path) -> None:
    """`{sys.executable}` of a notebook finds it where the scripts of its environment are not on PATH."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "lightning_recipes", "new"]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, text=True, capture_output=True)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, "   type: python -m lightning_recipes new <folder>")
