"""Code blocks and commands in README.md and docs/: which are run, which are only composed, and why."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

from recipes.errors import INSTALLED

OWN_DATA = ("mine.py", "houses.py", "reviews.py")  # files of own_data.md, in the order of their blocks
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(
    r"(?:<!-- (?P<comment>[^>]*?) -->\n)?^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
_PROGRAM = re.compile(r"(?:\w+=\S* )*(?:srun .*)?(?:(?:python|torchrun)\b.*?train\.py|lightning-recipes)(?=\s|$)")
_NOT_RUN = "not run: "


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced code block of a page, with the comment on the line before it."""

    page: Path
    language: str
    text: str
    comment: str | None

    @property
    def reason(self) -> str | None:
        """Why the commands are not run; None if they are."""
        if self.comment is None or not self.comment.startswith(_NOT_RUN):
            return None
        return self.comment.removeprefix(_NOT_RUN)


def read_blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced code blocks of a page."""
    for found in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(page=page, language=found["language"], text=found["text"], comment=found["comment"])


def read_commands(block: Block) -> list[list[str]]:
    """Return the overrides on every line that starts train.py in any way, or the installed command.

    A backslash continues a line.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        words = shlex.split(line, comments=True) if _PROGRAM.match(line) else []
        if program := next((word for word in words if word in ("train.py", INSTALLED)), None):
            found.append(words[words.index(program) + 1 :])
    return found


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
