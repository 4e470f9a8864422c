"""A mistake in what a person set: what it is, why it cannot be, what to type instead. No cost, no imports."""

from collections.abc import Sequence


class Mistake(ValueError):  # noqa: N818  what a person made, not what failed
    """A wrong setting, in three clauses; several are reported together.

    Attributes:
        you_set: The override as it stands, `key=value`.
        why: Why it cannot be.
        remedy: What to type instead.
    """

    def __init__(self, you_set: str, why: str, remedy: str) -> None:
        super().__init__(you_set, why, remedy)
        self.you_set = you_set
        self.why = why
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.you_set}: {self.why}; type {self.remedy}"


class MistakesError(Exception):
    """Several of them, where nothing has been started.

    Args:
        mistakes: All that are known.
        head: What they are the mistakes of.
    """

    def __init__(self, mistakes: list[Mistake], head: str) -> None:
        super().__init__(head)
        self.mistakes = mistakes
        self.head = head


def report(mistakes: Sequence[Mistake], head: str | None = None) -> str:
    """All mistakes, numbered, three lines each."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    lines = [head or f"The config has {count}; nothing was built."]
    for number, mistake in enumerate(mistakes, start=1):
        lines += [
            "",
            f"{number}. {mistake.you_set}",
            f"   {mistake.why}",
            f"   type: {mistake.remedy}",
        ]
    return "\n".join(lines)
