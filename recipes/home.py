"""Expand `~` in a path that was typed: a shell leaves the one in `data.path=~/texts` alone."""

import os
from pathlib import Path

from recipes.errors import ConfigError


def reject_address(path: str | Path, setting: str) -> None:
    """Reject the address of a store, such as `s3://bucket/folder`, where a path on disk is written to.

    Raises:
        ConfigError: It is one: as a path, it would be a new folder named `s3:` here.
    """
    if "://" in str(path):
        protocol, _, rest = str(path).partition("://")
        fix = f"{setting}={rest}" if protocol == "file" else f"{setting}=<path on disk>"
        raise ConfigError(f"{setting}={path}", "it is an address, and a path on disk is written to", fix)


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
