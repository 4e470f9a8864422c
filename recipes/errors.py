"""A mistake in what a person set: what it is, reason it cannot be, what to type instead. No cost, no imports."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """A wrong setting, in three clauses; several are reported together.

    Attributes:
        setting: The override as it stands, `key=value`.
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


class ConfigErrors(Exception):  # noqa: N818  several ConfigError
    """Several of them, where nothing has been started.

    Args:
        mistakes: All that are known.
        head: What they are the mistakes of.
    """

    def __init__(self, mistakes: list[ConfigError], head: str) -> None:
        super().__init__(head)
        self.mistakes = mistakes
        self.head = head


def format_report(mistakes: Sequence[ConfigError], head: str | None = None) -> str:
    """All mistakes, numbered, three lines each."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    lines = [head or f"The config has {count}; nothing was built."]
    for number, mistake in enumerate(mistakes, start=1):
        lines += [
            "",
            f"{number}. {mistake.setting}",
            f"   {mistake.reason}",
            f"   type: {mistake.fix}",
        ]
    return "\n".join(lines)
