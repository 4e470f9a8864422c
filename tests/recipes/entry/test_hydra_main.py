"""Hydra's own flags and sweeps: each mistake is one report and exit code 2, in process."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

import train
from recipes.entry.hydra_main import parse_flags
from recipes.errors import COMMAND_VARIABLE
from recipes.runtime.exit_codes import ExitCode


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("--config-dir nope", "--config-dir nope"),
        ("--config-path nope", "--config-path nope"),
        ("--config-path . --config-name nope", "--config-name nope"),
        ("--cfg job optimizer.lrr=3", "optimizer.lrr=3"),
        ("--cfg job model=gpt9", "model=gpt9"),
        ("-m seed=1,2 hydra.sweep.dir=file", "hydra.sweep.dir=file"),
        ("-m seed=1,2 hydra.sweep.dir=file/x", "hydra.sweep.dir=file/x"),
        ("-m seed=1,2 hydra.sweep.dir=${nope}", "hydra.sweep.dir=${nope}"),
        ("-m seed=1,2 optimizer.lrr=3", "optimizer.lrr=3"),
        ("seed=1,2 -m optimizer.lrr=3", "optimizer.lrr=3"),
        ("hydra.mode=MULTIRUN seed=1,2 optimizer.lrr=3", "optimizer.lrr=3"),
        ("-seed=5", "-seed=5"),
        ("-precision=16", "-precision=16"),
        ("--lr 1e-3", "--lr 1e-3"),
        ("--learning-rate 1e-3 seed=1", "--learning-rate 1e-3"),
        ("--cfg nope", "--cfg nope"),
        ("--info nope", "--info nope"),
        ("--package", "--package"),
        ("-m --cfg job seed=1,2", "--multirun --cfg"),
        ("--shell-completion nope", "--shell-completion"),
        ("--resolve", "--resolve"),
        ("--package optimizer", "--package optimizer"),
        ("--experimental-rerun x.pickle", "--experimental-rerun x.pickle"),
        ("--cfg job --package nope", "--package …"),
        ("--config-name recipe/sft tokenizer=bytes", "--config-name recipe/sft"),
        ("hydra.searchpath=[/nope]", "hydra.searchpath=[/nope]"),
        ("hydra.searchpath=[pkg://nope.conf]", "hydra.searchpath=[pkg://nope.conf]"),
        ("hydra.searchpath=conf", "hydra.searchpath=conf"),
        ("-m seed=1,2 hydra.sweep.dir=/proc/x", "hydra.sweep.dir=/proc/x"),
    ],
)
def test_a_mistake_is_named_as_it_was_typed(
    command: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", *command.split()])
    assert train.main() == ExitCode.INVALID_CONFIG
    printed = capsys.readouterr().err
    assert f"1. {setting}\n" in printed
    assert "type: " in printed
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_flags_and_overrides_stand_in_any_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for command in (
        "seed=7 optimizer.lr=3e-3 --cfg job --package optimizer",
        "--cfg job seed=7 -p optimizer optimizer.lr=3e-3",
    ):
        monkeypatch.setattr("sys.argv", ["train.py", *command.split()])
        assert train.main() == ExitCode.FINISHED
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "lr: 0.003" in printed[0]


def test_a_deleted_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr("sys.argv", ["train.py", "recpe=x"])
    assert train.main() == ExitCode.INVALID_CONFIG
    assert "type: cd <a folder that exists>" in capsys.readouterr().err


def test_a_sweep_in_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("theirs"))  # root may write anywhere
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "seed=1,2", "hydra.sweep.dir=theirs/x"])
    assert train.main() == ExitCode.INVALID_CONFIG
    printed = capsys.readouterr().err
    assert f"1. hydra.sweep.dir=theirs/x\n   {tmp_path}/theirs cannot be written to\n" in printed
    assert "type: hydra.sweep.dir=<a folder of yours>" in printed
    assert not (tmp_path / "theirs" / "x").exists()


@pytest.mark.parametrize("value", ["", "abc", "0"])
def test_a_variable_of_ranks_that_cannot_be_one_is_named(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert train.main() == ExitCode.INVALID_CONFIG
    assert "type: unset WORLD_SIZE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--dry-run", "debug=fast_dev_run, or --cfg job, which prints the config"),
        ("--max-steps 10", "trainer.max_steps=10"),
        ("--trainer.max_steps=5", "trainer.max_steps=5"),
        ("--seed_everything=1", "seed=1"),
        (
            "--config my/exp.yaml",
            "'hydra.searchpath=[<a folder>]' recipe=exp, with the file as <a folder>/recipe/exp.yaml",
        ),
        ("--max-steps", "trainer.max_steps=<value>"),
    ],
)
def test_what_a_flag_is_answered_with_is_a_setting_there_is(words: str, fix: str) -> None:
    _, [mistake] = parse_flags(words.split())
    assert mistake.fix == fix


@pytest.mark.parametrize("columns", [80, 140])
def test_the_help_on_a_terminal_breaks_no_word(columns: int) -> None:
    environ = os.environ | {"COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train.py"), "--help"]
    piped = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    terminal, other_end = pty.openpty()
    with subprocess.Popen(command, stdout=other_end, stderr=other_end, env=environ) as process:
        os.close(other_end)
        shown = b""
        with contextlib.suppress(OSError):  # the program has ended
            while chunk := os.read(terminal, 4096):
                shown += chunk
    os.close(terminal)
    assert process.returncode == 0
    assert shown.decode().split() == piped.split()
    assert max(map(len, shown.decode().splitlines())) < columns
    assert max(map(len, piped.splitlines())) > columns, "a pipe gets a line for each group"


def test_the_help_of_the_installed_command_has_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, shown in (("lightning-recipes", "lightning-recipes"), (None, "python train.py")):
        monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
        if name is not None:
            monkeypatch.setenv(COMMAND_VARIABLE, name)
        monkeypatch.setattr("sys.argv", ["train.py", "--help"])
        assert train.main() == ExitCode.FINISHED
        printed = capsys.readouterr().out
        assert f"\n{shown} [group=option …] [key=value …]\n" in printed
        assert f"\nSweep: {shown} -m optimizer.lr" in printed


@pytest.mark.parametrize("words", ["pipeline=chat_nano --help", "--version"])
def test_an_answer_that_nobody_reads_to_its_end_is_no_error(words: str) -> None:
    command = [sys.executable, str(ROOT / "train.py"), *words.split()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, said = process.communicate()
    assert (process.returncode, said) == (0, "")
