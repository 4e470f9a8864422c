"""Read the sizes of a published model from its config.json, to be frozen with the run."""

import functools
import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from recipes.errors import ConfigError, type_extra
from recipes.foreign_file import missing_config, missing_folder, reading

_FILE = "config.json"
_MAX_SHOWN = 100  # characters of a value in an error
_NESTED = ("text_config", "vision_config")  # in models of several towers
# what transformers (5.24) takes for a size that the file of such a model leaves out, as it writes no defaults
_DEFAULTS = {
    "clip": {"vocab_size": 49408, "max_position_embeddings": 77, "image_size": 224},
    "siglip": {"vocab_size": 32000, "max_position_embeddings": 64, "image_size": 224},
}
_FIX = f"model.name=<folder with {_FILE}, or hub id>"


def published_size(name: str | None, key: str) -> int | None:
    """Return an integer from config.json, such as `vocab_size`; `${published_size:…}` in conf/.

    Args:
        name: Folder, or repository on the Hugging Face hub, whose file is downloaded once.
        key: Key in the file, or in its `text_config` or `vision_config`.

    Returns:
        None if the file or key does not exist; the config check reports the reason.
    """
    try:
        return None if name is None else read_size(name, key)
    except ConfigError:
        return None


def read_size(name: str, key: str) -> int:
    """Return the same size, or raise the reason why it is missing.

    Raises:
        ConfigError: There is no such file, or it lacks the key.
    """
    folder = os.path.expanduser(name)
    # unlike Path.is_dir, False if the name is too long
    file = Path(folder, _FILE) if os.path.isdir(folder) else _find_on_hub(name)
    if isinstance(file, ConfigError):
        raise file
    if not os.path.lexists(file):
        raise missing_config(name, "model.name")
    with reading(file, f"model.name={name}", f"model.name=<folder with a valid {_FILE}>"):
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"a {type(config).__name__} instead of settings")
        parts = [config, *(part for name in _NESTED if isinstance(part := config.get(name), dict))]
        default = _DEFAULTS.get(str(config.get("model_type")), {}).get(key)
        found = next((part[key] for part in parts if key in part), default)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        kind, fix = config.get("model_type"), "model.name=<folder or hub id of a causal language model>"
        of = f" of a {kind}" if isinstance(kind, str) else ""
        reason = f"its {_FILE}{of} has no {key}, which every language model has"
        if found is not None:
            reason = f"its {_FILE} has {key}={json.dumps(found)[:_MAX_SHOWN]}, which no model can have"
            fix = f"model.name=<folder with a valid {_FILE}>"
        raise ConfigError(f"model.name={name}", reason, fix)
    return found


@functools.cache
def _find_on_hub(name: str) -> Path | ConfigError:
    """Return the file of a repository, or why there is none."""
    if (wrong := missing_folder(name, "model.name")) is not None:
        return wrong
    try:
        from huggingface_hub import constants, hf_hub_download
    except ImportError:
        reason = "not a local folder, and the hub needs huggingface-hub, which is not installed"
        return ConfigError(f"model.name={name}", reason, type_extra("huggingface"))
    host = str(urlsplit(constants.ENDPOINT).hostname)
    is_found = _is_found(host)  # else the hub library retries for half a minute
    try:
        return Path(hf_hub_download(name, _FILE, local_files_only=not is_found))
    except (OSError, ValueError) as error:  # offline, unknown, gated, or not a repository name
        if not is_found:
            reason = f"not a local folder, not downloaded yet, and {host} is not found: is this machine offline?"
            return ConfigError(f"model.name={name}", reason, _FIX)
        reason = str(error).strip().partition("\n")[0]
        return ConfigError(f"model.name={name}", f"not a local folder, and the hub says: {reason}", _FIX)


def _is_found(host: str) -> bool:
    """Return whether the host name resolves, or a proxy may resolve it."""
    if getproxies():
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
