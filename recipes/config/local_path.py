"""Reject the address of a bucket or a hub where a run reads and writes a path of this machine."""

import re

from recipes.config.overrides import for_shell
from recipes.errors import ConfigError

_ADDRESS = re.compile(r"([A-Za-z][\w+.-]*):/{1,2}(?=[^/])|(file):/+")  # Path writes s3://bucket as s3:/bucket


def find_address(setting: str, path: object) -> ConfigError | None:
    """Return the error in a path with a protocol, of which a run would make a folder named `s3:`; None for any other.

    Args:
        setting: Key that the path is the value of.
        path: Value of the setting.
    """
    found = _ADDRESS.match(path) if isinstance(path, str) else None
    if found is None:
        return None
    protocol = found[1] or found[2]
    shown, fix = f"{setting}={path}", f"{setting}=<a local folder, or one below which the storage is mounted>"
    if protocol == "file":
        return ConfigError(
            shown, "a path of this machine has no protocol", for_shell(f"{setting}=/{_local(str(path))}")
        )
    return ConfigError(shown, f"it is used as a path of this machine, and {protocol}:// is none", fix)


def _local(address: str) -> str:
    return address.removeprefix("file:").lstrip("/")
