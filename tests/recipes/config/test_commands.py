"""A printed command works as it is printed, with the folders and the classes that it needs."""

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.config import compose_and_check
from recipes.config.commands import repeat_command, resume_command
from recipes.config.compose import compose_run, freeze
from recipes.errors import COMMAND_VARIABLE, NOTEBOOK, PROJECT_VARIABLE, type_command

NET = """import torch

class Net(torch.nn.Module):
    input_kind = "images"
    def __init__(self, width: int = 4): ...
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a package of one's own, and name its folder in PYTHONPATH after that of this project."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my code/net_of_mine").mkdir(parents=True)
    (tmp_path / "my code/net_of_mine/__init__.py").write_text(NET)
    (tmp_path / "nothing").mkdir()
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), "my code", "nothing"]))
    monkeypatch.syspath_prepend("my code")
    return tmp_path / "my code"


def start(folder: str, *typed: str) -> list[str]:
    """Write what the config check reads of a run with a checkpoint; return its overrides."""
    checkpoint = Path(folder) / "checkpoints" / "step_0000001.ckpt"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    composed = compose_run(typed)
    freeze(replace(composed, run_folder=Path(folder)))
    (Path(folder) / "environment.json").write_text(json.dumps({"overrides": composed.overrides}))
    return composed.overrides


def test_the_command_that_resumes_a_run_of_own_classes_is_accepted_as_it_is(code: Path) -> None:
    overrides = start("run", "model=resnet18", "model._target_=net_of_mine.Net", "metrics=none")
    command = resume_command(Path("run"), overrides)
    assert command == "PYTHONPATH='my code' python train.py resume=run ++model._target_=net_of_mine.Net"
    variable, python, program, *words = shlex.split(command)
    assert (variable, python, program) == ("PYTHONPATH=my code", "python", "train.py")
    _, mistakes = compose_and_check(words)
    assert [str(mistake) for mistake in mistakes] == []
    _, [mistake] = compose_and_check(["resume=run"])
    assert mistake.setting == "model._target_=net_of_mine.Net", "the command has nothing that it does not need"


def test_a_run_without_own_classes_needs_neither_folder_nor_class(code: Path) -> None:
    assert resume_command(Path("run"), start("run", "model=resnet18")) == "python train.py resume=run"


def test_the_folders_of_classes_that_are_typed_or_of_own_options_are_in_a_command(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repeat_command(["model={_target_: net_of_mine.Net, width: 3}"]).startswith("PYTHONPATH='my code' python")
    assert repeat_command(["model._target_=torch.nn.Linear"]).startswith("python train.py")
    Path("own/model").mkdir(parents=True)
    Path("own/model/mine.yaml").write_text("_target_: net_of_mine.Net\nwidth: 3\n")
    typed = ["hydra.searchpath=[own]", "model=mine"]
    assert repeat_command(typed) == "PYTHONPATH='my code' python train.py 'hydra.searchpath=[own]' model=mine"
    overrides = start("run", *typed)
    assert resume_command(Path("run"), overrides) == (
        "PYTHONPATH='my code' python train.py 'hydra.searchpath=[own]' resume=run"
    )
    monkeypatch.setenv(PROJECT_VARIABLE, "my code")  # which the command adds by itself
    assert repeat_command(typed) == "python train.py 'hydra.searchpath=[own]' model=mine"


def test_a_folder_that_only_the_classes_import_from_is_in_a_command_with_theirs(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("layers").mkdir()
    Path("layers/layers_of_mine.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["layers", os.environ["PYTHONPATH"]]))
    typed = "model={_target_: net_of_mine.Net, width: 3}"
    assert repeat_command([typed]).startswith("PYTHONPATH='layers:my code' python train.py ")
    assert repeat_command(["model=resnet18"]) == "python train.py model=resnet18"


def test_a_notebook_is_answered_with_a_cell_or_a_call(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = start("run", "model=resnet18", "model._target_=net_of_mine.Net")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    assert resume_command(Path("run"), overrides) == (
        'lr.compose("resume=run", "++model._target_=net_of_mine.Net").fit()'
    )
    python = "{sys.executable} -m lightning_recipes"
    assert type_command("mode=evaluate resume=run") == f"!{python} mode=evaluate resume=run"
    typed = "model={_target_: net_of_mine.Net, width: 3}"  # IPython replaces {…}, but not {{…}}
    assert repeat_command([typed]) == (
        f"!PYTHONPATH='my code' {python} 'model={{{{_target_: net_of_mine.Net, width: 3}}}}'"
    )
    with monkeypatch.context() as of_cell:  # which finds code by sys.path alone
        of_cell.delenv("PYTHONPATH")
        assert repeat_command([typed]).startswith(f"!PYTHONPATH='my code' {python} ")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported by a script
    assert type_command("seed=3") == "python train.py seed=3"
    monkeypatch.setenv(COMMAND_VARIABLE, NOTEBOOK)  # of a rank that a notebook has started
    assert resume_command(Path("run"), ["seed=3"]).startswith("lr.compose(")


def test_an_argument_within_braces_is_left_out_there(code: Path) -> None:
    typed = ["model=resnet18", "model={_target_: net_of_mine.Net, act: relu}", "metrics=none"]
    _, [mistake] = compose_and_check(typed)
    assert (mistake.reason, mistake.fix) == (
        "Net has no argument 'act'",
        "the same command without act in model",
    )


def test_code_of_the_working_folder_is_named_by_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["task=lightning", "task.module={_target_: net_here.Net}", "data.module=null"]
    _, [elsewhere] = compose_and_check(typed)
    assert elsewhere.fix.startswith("PYTHONPATH=<the folder with net_here> before the command")
    (tmp_path / "net_here.py").write_text(NET)
    _, [here] = compose_and_check(typed)
    assert here.fix == "PYTHONPATH=. before the command, for the net_here in this folder"
