"""Draw a progress bar on the bottom line of a terminal; log records are printed above it.

Costs about a third of a millisecond per redraw and nothing in between: there is no refresh thread.
"""

import logging
import sys
from typing import TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

MIN_BAR_CELLS = 6
MAX_BAR_CELLS = 40


class LiveBar:
    """A progress bar, visible from `start` to `stop`.

    While it is live, `sys.stdout` and `sys.stderr` write through its console. So does every logging handler that
    was writing to one of them: a handler keeps the stream object it was created with, so replacing `sys.stderr` does
    not affect it. A stream that goes to a file or a pipe is left alone.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._redirected: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def start(self) -> None:
        """Take over the terminal's streams."""
        originals = (sys.stdout, sys.stderr)
        self._live.start()
        for handler in _stream_handlers():
            if handler.stream in originals and handler.stream.isatty():
                stream = handler.stream
                handler.setStream(cast(TextIO, FileProxy(self._console, stream)))
                self._redirected.append((handler, stream))

    def draw(self, *, fraction: float | None, before: str, after: str) -> None:
        """Redraw the line; see `bar_line` for the arguments."""
        line = bar_line(self._console.width, fraction=fraction, before=before, after=after)
        self._live.update(line, refresh=True)

    def stop(self) -> None:
        """Leave the last line on the screen and restore every stream; calling it twice is harmless."""
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()
        self._live.stop()


def bar_line(width: int, *, fraction: float | None, before: str, after: str) -> Text:
    """Return `before ━━━━━─── after` in at most `width` cells; drop the bar first if it does not fit.

    Then drop fields of `after` in its middle: the loss is its first, speed and time left are its last two.

    Args:
        width: Width of the terminal, in cells.
        fraction: Completed fraction of the run, 0 to 1; None draws no bar.
        before: Text left of the bar.
        after: Text right of the bar, fields with two spaces between them.
    """
    line = Text(before, no_wrap=True, overflow="ellipsis")
    width -= 1  # some terminals wrap a line that fills the full width
    fields = after.split("  ")
    while len(fields) > 2 and len(before) + 2 + len("  ".join(fields)) > width:
        del fields[-3 if len(fields) > 3 else -2]
    if (short := "  ".join(fields)) != after:
        after, fraction = short, None
    cells = min(MAX_BAR_CELLS, width - len(before) - len(after) - 4)
    if fraction is not None and cells >= MIN_BAR_CELLS:
        done = round(min(1.0, max(0.0, fraction)) * cells)
        line.append("  ").append("━" * done, style="cyan")
        line.append("━" * (cells - done), style="bright_black")
    line.append("  ").append(after)
    line.truncate(max(1, width), overflow="ellipsis")
    return line


def _stream_handlers() -> list[logging.StreamHandler[TextIO]]:
    """Return the handlers of all loggers that write to a stream other than a file."""
    named = logging.root.manager.loggerDict.values()  # includes placeholders
    loggers = [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]
    return [
        handler
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
    ]
