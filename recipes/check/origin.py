"""Where a wrong setting comes from: what was typed, or a line of a file under conf/."""

import re
from collections.abc import Sequence
from pathlib import Path

from recipes.check.words import CONF
from recipes.mistake import Mistake


def told_where(mistakes: Sequence[Mistake], overrides: Sequence[str]) -> list[Mistake]:
    """The mistakes without those that only follow from a typed one; the rest with the file to mend.

    Args:
        mistakes: Each about a key, `key=value`.
        overrides: What was typed.
    """
    typed = {override.lstrip("+~").partition("=")[0] for override in overrides}
    values = {m.you_set.partition("=")[2] for m in mistakes if _key(m) in typed}
    told: list[Mistake] = []
    for mistake in mistakes:
        if _key(mistake) in typed:
            told.append(mistake)
            continue
        if mistake.you_set.partition("=")[2] in values:
            continue  # the same value, by interpolation
        line = _line_of(_key(mistake))
        remedy = mistake.remedy if line is None else f"{mistake.remedy} ({line})"
        told.append(Mistake(mistake.you_set, mistake.why, remedy))
    return told


def _key(mistake: Mistake) -> str:
    return mistake.you_set.removeprefix("no ").partition("=")[0]


def _line_of(key: str) -> str | None:
    """`in conf/model/mine.yaml, line 4`, where exactly one line under conf/ sets the last part of a key."""
    wanted = re.compile(rf"\s*{re.escape(key.rpartition('.')[2])}\s*:")
    found = [
        f"in {path.relative_to(CONF.parent)}, line {number}"
        for path in sorted(Path(CONF).rglob("*.yaml"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if wanted.match(line)
    ]
    return found[0] if len(found) == 1 else None
