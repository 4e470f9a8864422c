"""Config errors in three clauses: what you set, why it cannot work, what to type. Imports only the standard library."""

from collections.abc import Sequence

# C0 and C1 control characters except tab and newline, and bidirectional controls: a terminal interprets them
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_ESCAPES = {code: repr(chr(code))[1:-1] for code in sorted(_CONTROLS)}


class ConfigError(ValueError):
    """A wrong setting, in three clauses; all errors found are reported together.

    Attributes:
        setting: The override as set, `key=value`.
        reason: Why it cannot work.
        fix: What to type instead.
    """

    def __init__(self, setting: str, reason: str, fix: str) -> None:
        super().__init__(setting, reason, fix)
        self.setting = setting
        self.reason = reason
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.setting}: {self.reason}; type {self.fix}"


class ConfigErrors(Exception):  # noqa: N818  a collection of ConfigError
    """Several wrong settings, found before anything was started.

    Args:
        mistakes: All errors found.
        head: First line of the report.
    """

    def __init__(self, mistakes: list[ConfigError], head: str) -> None:
        super().__init__(head)
        self.mistakes = mistakes
        self.head = head


def find_mistake(error: BaseException | None) -> ConfigError | None:
    """Return the first `ConfigError` in the `__cause__` chain, or None; Hydra wraps what a constructor raises."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    return error


def format_report(mistakes: Sequence[ConfigError], head: str | None = None) -> str:
    """Format all errors as a numbered list, three lines each.

    Args:
        mistakes: All errors found.
        head: First line; None: the number of errors in the config.
    """
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    lines = [head or f"The config has {count}; nothing was built."]
    for number, mistake in enumerate(mistakes, start=1):
        lines += [
            "",
            f"{number}. {mistake.setting}",
            f"   {mistake.reason}",
            f"   type: {mistake.fix}",
        ]
    return escape_controls("\n".join(lines))  # a config read from a folder may hold any character


def escape_controls(text: str) -> str:
    """Escape terminal control characters, for example as `\\x1b`; tabs and newlines stay."""
    return text.translate(_ESCAPES)
