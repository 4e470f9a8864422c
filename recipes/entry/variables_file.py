"""Read environment variables from `.env` in the working folder, such as WANDB_API_KEY; those that are set stay."""

import re
from collections.abc import MutableMapping
from pathlib import Path

from recipes.errors import ConfigError

VARIABLES_FILE = ".env"
_LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*
    (?:'(?P<literal>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>.*?))
    (?:(?<!\S)\#.*|\s+\#.*)?\s*""",
    re.VERBOSE,
)


def read_variables(folder: Path, environ: MutableMapping[str, str]) -> tuple[str | None, list[ConfigError]]:
    """Set the variables of the `.env` file of a folder that are not set yet.

    A line is `NAME=value`, with `export` before it or not, the value in quotes or not; nothing in it is expanded.

    Args:
        folder: Folder of the file, which need not exist.
        environ: Environment, which is changed unless there are errors.

    Returns:
        A line that names the variables that were set, never their values; None if there are none. And the errors.
    """
    try:
        text = (folder / VARIABLES_FILE).read_text(encoding="utf-8-sig")
    except (FileNotFoundError, IsADirectoryError):  # a folder of that name is a virtual environment
        return None, []
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else f"{error.strerror}"
        return None, [
            ConfigError(VARIABLES_FILE, f"it cannot be read: {reason}", f"mv {VARIABLES_FILE} <another name>")
        ]
    found: dict[str, str] = {}
    mistakes = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or (match["plain"] or "")[:1] in ("'", '"'):
            # without the line itself, which may hold a secret
            where, reason = f"{VARIABLES_FILE}, line {number}", "it is not NAME=value"
            mistakes.append(ConfigError(where, reason, f"NAME=value in that line, or # before it, in {VARIABLES_FILE}"))
            continue
        quoted = None if match["quoted"] is None else re.sub(r"\\(.)", r"\1", match["quoted"])
        found[match["name"]] = next(text for text in (match["literal"], quoted, match["plain"]) if text is not None)
    added = {name: value for name, value in found.items() if name not in environ}
    if mistakes or not added:
        return None, mistakes
    environ.update(added)
    return f"{VARIABLES_FILE} sets {', '.join(added)}", []
