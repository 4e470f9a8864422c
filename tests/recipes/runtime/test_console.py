"""What a terminal obeys is printed as text."""

import logging
import os
from pathlib import Path

import pytest

from recipes.errors import ConfigError, escape_controls, format_report
from recipes.runtime.console import LOGGER, open_console


def test_sampled_text_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_console(tmp_path / "train.log")
    LOGGER.info("red \x1b[31m, bell \a, shift out \x0e, return \r, C1 \x9b2J, reversed \u202e; tab\tnewline\né 🙂")
    expected = (
        "red \\x1b[31m, bell \\x07, shift out \\x0e, return \\r, C1 \\x9b2J, reversed \\u202e; tab\tnewline\né 🙂\n"
    )
    assert capsys.readouterr().out == expected
    assert (tmp_path / "train.log").read_text() == expected
    assert logging.getLogger("lightning_recipes").handlers


def test_a_run_goes_on_when_nobody_reads_its_console_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after `python train.py | head -7`."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as console:
        monkeypatch.setattr("sys.stdout", console)
        open_console(tmp_path / "train.log")
        os.close(reader)
        for number in range(3):
            LOGGER.info(f"line {number}")
    assert capfd.readouterr().err == ""
    gone = "The console is closed: further lines go only to train.log"
    assert sorted((tmp_path / "train.log").read_text().splitlines()) == sorted([gone, "line 0", "line 1", "line 2"])


def test_a_reported_value_cannot_control_the_terminal() -> None:
    report = format_report([ConfigError("name=\x1b]0;x\a", "it is odd", "name=<text>")])
    assert "1. name=\\x1b]0;x\\x07\n" in report
    assert escape_controls("plain\n\ttext") == "plain\n\ttext"
