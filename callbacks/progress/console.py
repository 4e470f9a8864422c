"""Show a logger's INFO records on the console even if the logging setup would drop them."""

import logging
from collections.abc import Iterator


def show_info(log: logging.Logger) -> logging.Handler | None:
    """Show a logger's INFO records on the console until `stop_showing` is called.

    Returns:
        The handler that `stop_showing` removes; None if they are shown already or the logger's own level forbids it.
    """
    on_console = any(_is_console(handler) and handler.level <= logging.INFO for handler in _handlers(log))
    if on_console and log.isEnabledFor(logging.INFO):
        return None
    if log.level not in (logging.NOTSET, logging.INFO, logging.DEBUG):
        return None
    handler: logging.Handler = logging.NullHandler() if on_console else logging.StreamHandler()
    handler.set_name(f"level {log.level}")
    log.addHandler(handler)
    log.setLevel(min(log.level or logging.INFO, logging.INFO))
    return handler


def stop_showing(log: logging.Logger, handler: logging.Handler | None) -> None:
    """Undo `show_info`."""
    if handler is not None:
        log.removeHandler(handler)
        log.setLevel(int(str(handler.name).removeprefix("level ")))


def _handlers(log: logging.Logger) -> Iterator[logging.Handler]:
    """Yield every handler that receives this logger's records."""
    logger: logging.Logger | None = log
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _is_console(handler: logging.Handler) -> bool:
    """Return whether a handler writes to something other than a file."""
    return not isinstance(handler, (logging.FileHandler, logging.NullHandler))
