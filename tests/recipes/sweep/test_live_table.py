"""The table of a sweep on a terminal: the lines of the log stand above it, each once, and the table is drawn once."""

import os
import pty
import re
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console

from recipes.launcher.job import Job, State
from recipes.runtime.console import LOGGER, open_console
from recipes.sweep import live_table
from recipes.sweep.live_table import LiveTable, make_table
from recipes.sweep.progress import Progress

_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


class Screen:
    """What a terminal shows after some output: text, carriage returns, and the two sequences that move or erase."""

    def __init__(self, output: str) -> None:
        self.lines = [""]
        self._row = self._column = 0
        for found in _SEQUENCE.finditer(output):
            self._take(found[0], found[1], found[2])

    def _take(self, text: str, number: str | None, command: str | None) -> None:
        if command == "A":
            self._row = max(0, self._row - int(number or 1))
        elif command == "K":
            self.lines[self._row] = ""
        elif command is not None:
            assert command in "mlh", f"an unknown sequence, {text!r}"  # colors; the cursor is hidden and shown
        elif text == "\n":
            self._row += 1
            self.lines += [""] * (self._row + 1 - len(self.lines))
        elif text == "\r":
            self._column = 0
        else:
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
            self._column += len(text)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Return one end of a pseudo-terminal, and a function that reads all that the other end has received."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    received = b""

    def read() -> str:
        nonlocal received
        stdout.flush()
        while select.select([ours], [], [], 0)[0]:
            received += os.read(ours, 65536)
        return received.decode()

    with os.fdopen(theirs, "w") as stdout:
        yield stdout, read
    os.close(ours)


def test_on_a_terminal_every_line_of_the_log_is_shown_once_above_one_table(
    terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stdout, read_terminal = terminal
    monkeypatch.setattr(sys, "stdout", stdout)  # here, as pytest replaces it before each phase of a test
    monkeypatch.setattr(live_table, "_REFRESH_SECONDS", 0.0)
    open_console(tmp_path / "sweep.log")
    jobs = [Job(number=number, folder=Path(str(number)), overrides=[]) for number in range(2)]
    values = {0: {"optimizer.lr": "0.001"}, 1: {"optimizer.lr": "0.003"}}
    table = LiveTable(Console(), jobs, lambda: values)
    lines = ["Sweep: 2 jobs"]
    LOGGER.info(lines[0])
    with table.updating():
        for job in jobs:
            for state in (State.RUNNING, State.FINISHED):
                if job is jobs[-1] and state is State.FINISHED:  # ends too soon after the table was drawn
                    monkeypatch.setattr(live_table, "_REFRESH_SECONDS", 1e9)
                job.state = state
                lines.append(f"job {job.number} {state}")
                LOGGER.info(lines[-1])
                table.show({})
                read_terminal()  # its buffer holds 4 KB
    lines.append("Best: job 0")
    LOGGER.info(lines[-1])
    rows = [line.split() for line in Screen(read_terminal()).lines]
    table_rows = [["job", "optimizer.lr", "state", "step", "loss", "val", "left"]]
    table_rows += [["0", "0.001", "finished"], ["1", "0.003", "finished"], ["2", "finished"]]
    expected = [line.split() for line in lines]
    assert [row for row in rows if row] == [*expected[:-1], *table_rows, expected[-1]]
    assert (tmp_path / "sweep.log").read_text().splitlines() == lines


def test_policies_have_their_rewards_in_the_place_of_a_loss_that_says_nothing(tmp_path: Path) -> None:
    for number, (names, expected) in enumerate(
        {"train/loss,val/loss": ["loss", "val"], "train/loss,reward/mean,val/reward": ["reward", "val"]}.items()
    ):
        job = Job(number=number, overrides=[], folder=tmp_path / str(number))
        job.folder.mkdir()
        (job.folder / "metrics.csv").write_text(f"step,{names}\n1,{','.join('1234'[: names.count(',') + 1])}\n")
        progress = Progress(job.folder, None)
        progress.read()
        table = make_table([job], {}, {number: progress})
        assert [column.header for column in table.columns][-3:-1] == expected
        assert [[*column.cells] for column in table.columns][-3:-1] == (
            [["1.0000"], ["2.0000"]] if number == 0 else [["2.0000"], ["3.0000"]]
        )
