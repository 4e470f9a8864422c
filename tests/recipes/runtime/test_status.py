"""The line on a terminal that says what a process does, on a pty."""

import os
import pty
import subprocess
import sys

from support import ROOT

PROGRAM = """
import time
from recipes.runtime import status
from recipes.runtime.console import LOGGER, open_console

open_console()
with status.showing("evaluate", "loading torch"):
    time.sleep(0.3)
    status.say("batch 3 of 40")
    time.sleep(1.0)
    LOGGER.info("a line of the log")
    time.sleep(0.6)
LOGGER.info("the result")
"""


def run_on_terminal(columns: int) -> str:
    terminal, other_end = pty.openpty()
    environ = os.environ | {"COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=other_end, stderr=other_end, env=environ)
    os.close(other_end)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # the program has ended
        pass
    assert process.wait(30) == 0
    return shown.decode()


def test_a_terminal_shows_what_is_done_and_for_how_long_and_keeps_only_the_log() -> None:
    shown = run_on_terminal(80)
    drawn = [line.strip() for line in shown.replace("\n", "\r\x1b[2K").split("\r\x1b[2K") if line.strip()]
    assert drawn[0] == "evaluate: loading torch  0:00"
    assert "evaluate: batch 3 of 40  0:01" in drawn
    # what stays of each row is what follows the last time that it was erased
    kept = [row.rstrip("\r").rpartition("\x1b[2K")[2] for row in shown.split("\n")]
    assert kept == ["a line of the log", "the result", ""]


def test_a_narrow_terminal_gets_no_second_row() -> None:
    shown = run_on_terminal(20)
    assert "evaluate: loading t\r" in shown


def test_a_pipe_gets_only_the_log() -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("a line of the log\nthe result\n", "")
