"""Expand `~` in a path that was typed: a shell leaves the one in `data.path=~/texts` alone."""

import os
from pathlib import Path

from recipes.errors import ConfigError


def expand_home(path: str, setting: str) -> Path:
    """Return a path with the home folder for `~`; `Path.expanduser` raises RuntimeError for an unknown user.

    Args:
        path: As typed.
        setting: Config key of the path, such as "data.path".

    Raises:
        ConfigError: It is empty, which would be the working directory; or there is no such user.
    """
    if not path.strip():
        raise ConfigError(f"{setting}={path}", "it is empty", f"{setting}=<a path; . is the working directory>")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") and not os.path.lexists(expanded):
        user = expanded.partition("/")[0].removeprefix("~")
        fix = f"{setting}=<a path without ~{user}>"
        raise ConfigError(f"{setting}={path}", f"this machine has no user {user}", fix)
    return Path(expanded)
