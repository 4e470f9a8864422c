"""A mistake in what a person set: what it is, why it cannot be, what to type instead. No cost, no imports."""


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
