"""Read the comments of a YAML file in conf/: the header and the comment on each key."""

import re
from pathlib import Path

CONF = Path(__file__).parents[2] / "conf"

_KEY = re.compile(r"(?P<indent> *)(?P<key>[\w-]+):(?: +(?P<value>.*?))?(?P<comment> +#.*)?$")
_COMMAND = re.compile(r"\s*(python|torchrun) ")


def read_header(path: Path) -> tuple[str, list[str]]:
    """Return the comment at the top of a file as a single line, and the commands it contains."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").removeprefix(" "))
    commands = [line.strip() for line in lines if _COMMAND.match(line)]
    return " ".join(line.strip() for line in lines if not _COMMAND.match(line)), commands


def read_comments(path: Path) -> dict[str, str]:
    """Map each key's dotted path to its trailing comment; continuation lines are joined."""
    comments: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    last = None
    for line in path.read_text(encoding="utf-8").splitlines():
        found = _KEY.match(line)
        if found is not None and not line.lstrip().startswith("#"):
            indent = len(found["indent"])
            parents = [(width, name) for width, name in parents if width < indent] + [(indent, found["key"])]
            last = ".".join(name for _, name in parents) if found["comment"] else None
            if last is not None:
                comments[last] = found["comment"].strip().removeprefix("#").strip()
        elif last is not None and line.strip().startswith("#") and line.startswith("   "):
            comments[last] += " " + line.strip().removeprefix("#").strip()
        else:
            last = None
    return comments
