"""One line at the bottom of a terminal that says what a process does now and for how long. Elsewhere it shows nothing.

A thread redraws it every half second, also during an import. Lines of the log go above it (`hidden`). In the output of
a notebook's cell it is redrawn whenever something else is done.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_REDRAW_SECONDS = 0.5
_ERASE = "\r\x1b[2K"


class _Status:
    """The line of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may log while the line is drawn
        self.title: str | None = None  # None: nothing is shown
        self.text = ""
        self.began = 0.0
        self.is_drawn = False
        self.ended = threading.Event()
        self.cell: Any = None  # what IPython has displayed in a notebook

    def describe(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{self.title}: {self.text}  {minutes}:{seconds:02d}"

    def draw(self) -> None:
        with self.lock:
            if self.title is None or sys.stderr is None:
                return
            width = shutil.get_terminal_size().columns - 1
            with contextlib.suppress(OSError):  # the terminal is gone, and the run need not end for it
                sys.stderr.write(_ERASE + self.describe()[:width])
                sys.stderr.flush()
            self.is_drawn = True

    def erase(self) -> None:
        with self.lock:
            if self.is_drawn and sys.stderr is not None:
                with contextlib.suppress(OSError):
                    sys.stderr.write(_ERASE)
                    sys.stderr.flush()
            self.is_drawn = False


_STATUS = _Status()


@contextlib.contextmanager
def showing(title: str, text: str) -> Iterator[None]:
    """Show the line until the context or `end` ends it.

    Args:
        title: What runs, such as the mode.
        text: What it does first.
    """
    if sys.stderr is None or not sys.stderr.isatty() or _STATUS.title is not None:
        yield
        return
    _STATUS.title, _STATUS.text, _STATUS.began, _STATUS.ended = title, text, time.monotonic(), threading.Event()
    threading.Thread(target=_redraw, args=(_STATUS.ended,), name="status", daemon=True).start()
    try:
        yield
    finally:
        end()


@contextlib.contextmanager
def showing_in_cell(title: str, text: str) -> Iterator[None]:
    """Show the line in the output of the running cell until the context ends; as `showing` outside of a notebook.

    Args:
        title: What runs, such as the mode.
        text: What it does first.
    """
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel") or _STATUS.title is not None:
        with showing(title, text):
            yield
        return
    _STATUS.title, _STATUS.text, _STATUS.began = title, text, time.monotonic()
    _STATUS.cell = ipython.display.display(_as_output(_STATUS.describe()), raw=True, display_id=True)
    try:
        yield
    finally:
        _STATUS.cell.update(_as_output(""), raw=True)
        _STATUS.cell = _STATUS.title = None


def _as_output(line: str) -> dict[str, str]:
    return {"text/plain": line}


def say(text: str) -> None:
    """Say what is done now, such as `evaluating batch 3 of 40`; costs a microsecond, in a cell a millisecond."""
    _STATUS.text = text
    if _STATUS.cell is not None:
        _STATUS.cell.update(_as_output(_STATUS.describe()), raw=True)


def end() -> None:
    """Remove the line for good, for example where a progress bar takes its place."""
    with _STATUS.lock:
        _STATUS.erase()
        _STATUS.title = None
        _STATUS.ended.set()


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Remove the line while something else is written to the terminal."""
    with _STATUS.lock:
        _STATUS.erase()
        yield


def _redraw(ended: threading.Event) -> None:
    while True:
        _STATUS.draw()
        if ended.wait(_REDRAW_SECONDS):
            return
