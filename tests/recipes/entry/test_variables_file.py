"""Variables of `.env`: read from the working folder, named but never shown, and never in the place of set ones."""

from pathlib import Path

import pytest

import train
from recipes.entry.variables_file import read_variables
from recipes.runtime.exit_codes import ExitCode

TEXT = """# keys
WANDB_API_KEY=secret#1
export RECIPES_CACHE = "a \\"folder\\"" # of mine
EMPTY=
SINGLE='it # is $HOME'
SET=again
"""


def test_set_variables_are_kept_and_values_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(TEXT)
    environ = {"SET": "before"}
    line, mistakes = read_variables(tmp_path, environ)
    assert not mistakes
    assert line == ".env sets WANDB_API_KEY, RECIPES_CACHE, EMPTY, SINGLE"
    assert environ == {
        "SET": "before",
        "WANDB_API_KEY": "secret#1",
        "RECIPES_CACHE": 'a "folder"',
        "EMPTY": "",
        "SINGLE": "it # is $HOME",
    }
    assert read_variables(tmp_path, environ) == (None, [])


@pytest.mark.parametrize("line", ["secret", "A B=1", "NAME='open", '="x"', "1A=2"])
def test_a_line_that_sets_nothing_is_named_by_its_number(line: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"GOOD=1\n{line}\n")
    environ: dict[str, str] = {}
    shown, [mistake] = read_variables(tmp_path, environ)
    assert shown is None
    assert str(mistake).startswith(".env, line 2: it is not NAME=value; type ")
    assert "secret" not in str(mistake)
    assert environ == {}


def test_a_folder_without_a_file_sets_nothing(tmp_path: Path) -> None:
    assert read_variables(tmp_path, {}) == (None, [])
    (tmp_path / ".env").mkdir()
    assert read_variables(tmp_path, {}) == (None, [])


def test_the_command_reads_the_working_folder_and_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_FILE", "x")
    monkeypatch.delenv("FROM_FILE")  # set by the command, it is taken out again after this test
    (tmp_path / ".env").write_text("FROM_FILE=hidden\n")
    monkeypatch.setattr("sys.argv", ["train.py", "recipe=nothing"])
    assert train.main() == ExitCode.INVALID_CONFIG
    printed = capsys.readouterr().err
    assert printed.splitlines()[0] == ".env sets FROM_FILE"
    assert "hidden" not in printed


def test_the_version_is_that_of_the_project_and_of_what_it_runs_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--version"])
    assert train.main() == ExitCode.FINISHED
    assert capsys.readouterr().out.startswith("lightning-recipes 0.1.0, torch ")
