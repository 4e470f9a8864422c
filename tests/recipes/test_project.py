"""A project of one's own: what a new one holds and does, and what is found in the folder where a command runs."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import ROOT, read_metrics, write_texts

import lightning_recipes as lr
import train
from recipes.config import compose_and_check
from recipes.config.check.config_folder import check_config_folder
from recipes.config.compose import CONF
from recipes.errors import COMMAND_VARIABLE, ConfigError, type_command, type_extra
from recipes.project import open_project, write_project
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.process import python_path

FILES_OF_EXPORT = ["README.md", "export.json", "model.safetensors"]
FOUND = ["hydra.searchpath=[conf]"]
COMMAND = (sys.executable, "-c", "from lightning_recipes.recipes.entry.installed import main; main()")


@pytest.fixture
def _as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Work in an empty folder, and take the code of a project from the import path again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr("sys.path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_net"]:
        del sys.modules[name]


def run(folder: Path, *overrides: str) -> str:
    """Run the installed command in a folder and return what it prints."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*COMMAND, *overrides], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("_as_it_was")
def test_a_new_project_is_found_in_its_folder_and_its_own_mistakes_are_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "new", "My-Net"])
    assert train.main() == ExitCode.FINISHED
    assert f"type: cd {tmp_path}/My-Net && lightning-recipes recipe=first" in capsys.readouterr().out
    texts = {str(file.relative_to("My-Net")): file.read_text() for file in Path("My-Net").rglob("*") if file.is_file()}
    assert {"README.md", ".gitignore", ".github/workflows/tests.yaml", "tests/test_my_net.py"} <= texts.keys()
    assert not [name for name, text in texts.items() if "my_project" in name + text]
    assert open_project([]) == []  # not in the folder above
    monkeypatch.chdir("My-Net")
    assert open_project([]) == FOUND
    assert open_project(FOUND) == open_project(["hydra.searchpath=[]"]) == []  # what is typed counts
    assert python_path() == os.pathsep.join([str(ROOT), f"{tmp_path}/My-Net/src", "before"])
    composed, mistakes = compose_and_check([*FOUND, "recipe=first"])
    assert mistakes == []
    assert composed is not None
    assert composed.config["model"] == {
        "_target_": "my_net.model.Classifier", "num_classes": 3, "width": 64, "num_layers": 2
    }  # fmt: skip
    for typed, fix in {"recipe=frist": "recipe=first", "recipe=first model.wdth=3": "model.width=3"}.items():
        _, mistakes = compose_and_check([*FOUND, *typed.split()])
        assert [mistake.fix for mistake in mistakes] == [fix]
    for name, fix in {"first": "recipe=first", "model/classifier": "model=classifier"}.items():
        monkeypatch.setattr("sys.argv", ["train.py", *FOUND, "--config-name", name])
        assert train.main() == ExitCode.INVALID_CONFIG
        assert f"type: {fix}\n" in capsys.readouterr().err
    Path("conf/mine.yaml").write_text("seed: 3\n")
    monkeypatch.setattr("sys.argv", ["train.py", *FOUND, "--config-name", "mine"])
    assert train.main() == ExitCode.INVALID_CONFIG
    assert "with # @package _global_ as its first line, and then recipe=mine" in capsys.readouterr().err


@pytest.mark.usefixtures("_as_it_was")
def test_a_folder_of_somebody_else_is_no_project_and_neither_is_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("conf/nginx").mkdir(parents=True)
    Path("src").mkdir()
    before = [*sys.path]
    assert open_project([]) == []
    monkeypatch.chdir(CONF.parent)
    assert open_project([]) == []
    assert (sys.path, os.environ["PYTHONPATH"]) == (before, "before")


@pytest.mark.usefixtures("_as_it_was")
def test_a_clone_that_is_not_the_installed_one_is_no_project_and_is_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("conf/config.yaml", "conf/recipe/quickstart.yaml", "lightning_recipes/one_name.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    assert open_project([]) == []
    assert capsys.readouterr().err.endswith("type: python train.py, which runs the clone\n")
    (tmp_path / "lightning_recipes/one_name.py").unlink()
    assert open_project([]) == FOUND


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "it takes a folder, and nothing else"),
        (["a", "b"], "it takes a folder, and nothing else"),
        (["recipe=first"], "it takes a folder, and nothing else"),
        (["3d"], "3d cannot be the name of its Python package"),
        (["torch"], "torch is the name of another Python package, which would be imported"),
        (["full"], "full is there, and not empty"),
        (["full/file/net"], "full/file/net cannot be made: Not a directory"),
    ],
)
def test_a_project_is_written_to_a_new_folder_alone(words: list[str], reason: str, tmp_path: Path) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    with pytest.raises(ConfigError) as caught:
        write_project(words)
    assert reason in caught.value.reason.replace(f"{tmp_path}/", "")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


@pytest.mark.usefixtures("_as_it_was")
def test_a_new_repository_is_filled(tmp_path: Path) -> None:
    Path("my_net/.git").mkdir(parents=True)
    assert write_project(["my_net"]) == tmp_path / "my_net"
    assert Path("my_net/.github/workflows/tests.yaml").is_file()


def test_a_printed_command_has_the_name_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    assert type_command("seed=3") == "python train.py seed=3"
    monkeypatch.setenv(COMMAND_VARIABLE, "lightning-recipes")
    assert type_command("seed=3") == "lightning-recipes seed=3"


def test_an_extra_is_installed_from_a_clone_or_beside_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    assert type_extra("onnx") == "pip install -e '.[onnx]'"
    monkeypatch.setenv(COMMAND_VARIABLE, "lightning-recipes")
    assert type_extra("onnx") == "pip install 'lightning-recipes[onnx]'"


def test_the_torch_that_ci_installs_is_the_one_that_the_recipes_need(project: Path) -> None:
    """Another one would be replaced by the next line, with the build for GPUs."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["recipes"]
    [torch_needed] = [each for each in needed if each.startswith("torch>")]
    assert f"pip install '{torch_needed}' --index-url" in (project / ".github/workflows/tests.yaml").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a project and train its first experiment with the installed command."""
    folder = write_project([str(tmp_path_factory.mktemp("projects") / "my_net")])
    printed = run(folder, "recipe=first", "trainer.accelerator=cpu", "hydra.run.dir=logs/mine")
    assert "Finished: 300 steps" in printed
    return folder


@pytest.mark.usefixtures("_as_it_was")
def test_a_project_trains_resumes_evaluates_and_loads(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_metrics(project / "logs/mine")[-1]["val/accuracy"] > 0.95
    assert "resumed from" in run(project, "resume=logs/mine", "trainer.max_steps=310")
    assert "accuracy" in run(project, "resume=logs/mine", "mode=evaluate")
    assert (project / "logs/mine/config.yaml").read_text().startswith(f"# Run it again: lightning-recipes '{FOUND[0]}'")
    monkeypatch.chdir(project)
    model = lr.load("logs/mine")
    assert (type(model).__module__, type(model).__name__) == ("my_net.model", "Classifier")
    assert lr.read("logs/mine").rows[-1]["step"] == 310
    printed = run(project, "resume=logs/mine", "mode=export")
    assert printed.splitlines()[-1].endswith("every file was read back and is equal")
    assert sorted(path.name for path in Path("logs/mine/export").iterdir()) == FILES_OF_EXPORT
    same = lr.load("logs/mine/export")
    points = torch.linspace(-1.0, 1.0, 10).reshape(5, 2)
    with torch.no_grad():
        assert torch.equal(same(points), model(points))
    record = json.loads(Path("logs/mine/export/export.json").read_text())
    assert record["inputs"] == {"kind": "tensors", "shape": [2], "dtype": "float32"}
    assert record["outputs"] == {"kind": "classes", "number": 3}
    assert lr.compose("recipe=first").config["data"]["train"]["_target_"] == "my_net.data.Spirals"


def test_a_project_sweeps_and_names_its_own_command(project: Path) -> None:
    printed = run(project, "-m", "recipe=first", "model.width=8,16", "trainer.max_steps=4", "eval_every=4")
    assert f": lightning-recipes '{FOUND[0]}' recipe=first model.width=" in printed.splitlines()[-1]


def test_a_language_model_of_an_own_recipe_is_exported(project: Path) -> None:
    write_texts(project / "texts")
    recipe = (
        "# @package _global_\ndefaults:\n  - override /data: text_files\n  - override /tokenizer: bytes\nname: texts\n"
        "model: {vocab_size: 257, num_layers: 2, num_heads: 2, hidden_size: 32, max_seq_len: 32}\n"
        "data: {path: texts}\nglobal_batch_size: 8\nwarmup_steps: 1\neval_samples: 8\ntrainer: {max_steps: 4}\n"
    )
    (project / "conf/recipe/texts.yaml").write_text(recipe)
    run(project, "recipe=texts", "trainer.accelerator=cpu", "hydra.run.dir=logs/texts", "callbacks=[grad_norm]")
    run(project, "resume=logs/texts", "mode=export")
    assert (project / "logs/texts/export/config.json").is_file()
    (project / "conf/recipe/texts.yaml").unlink()


def test_the_tests_of_a_project_pass(project: Path) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1].startswith("3 passed"), done.stdout + done.stderr


def test_the_folder_of_a_project_needs_no_trust_but_that_of_being_typed(project: Path) -> None:
    assert check_config_folder(project / "conf", "config", [f"hydra.searchpath=[{project}/conf]"]) == []
