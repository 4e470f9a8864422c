"""Sizes of a published model, from its config.json: composed, checked and frozen with the run."""

import json
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError

_FILE = "config.json"
_NESTED = "text_config"  # of models that read images, too


def published_size(name: str | None, key: str) -> int | None:
    """Return a number of config.json, such as `vocab_size`; `${published_size:…}` in conf/.

    Args:
        name: Folder, or name of a repository of the Hugging Face hub, whose file is downloaded once.
        key: In the file, or in its `text_config`.

    Returns:
        None where there is no such file or number, for which the check of the config has the reason.
    """
    try:
        return None if name is None else read_size(name, key)
    except ConfigError:
        return None


def read_size(name: str, key: str) -> int:
    """Return the same number.

    Raises:
        ConfigError: There is no such file, or it has no such number.
    """
    path = Path(name).expanduser()
    fix = "model.name=<folder with config.json, or hub id>"
    file = path / _FILE if path.is_dir() else _find_on_hub(name, fix=fix)
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name={name}", f"its {_FILE} cannot be read ({error})", fix) from error
    found = config.get(key, (config.get(_NESTED) or {}).get(key))
    if not isinstance(found, int):
        raise ConfigError(f"model.name={name}", f"its {_FILE} has no {key}", f"model.{key}=<number>")
    return found


_asked: dict[str, Path | ConfigError] = {}  # offline, the hub's library tries for half a minute


def _find_on_hub(name: str, *, fix: str) -> Path:
    """Return the file of a repository, or the error of the first time."""
    if name not in _asked:
        try:
            _asked[name] = _download(name, fix=fix)
        except ConfigError as error:
            _asked[name] = error
    found = _asked[name]
    if isinstance(found, ConfigError):
        raise found
    return found


def _download(name: str, *, fix: str) -> Path:
    if name.startswith((".", "/", "~")):
        raise ConfigError(f"model.name={name}", "there is no such folder", fix)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        reason = "it is no folder here, and the hub needs huggingface-hub, which is not installed"
        raise ConfigError(f"model.name={name}", reason, "pip install -e '.[huggingface]'") from error
    try:
        return Path(hf_hub_download(name, _FILE))
    except (OSError, ValueError) as error:  # offline, unknown, gated, or no name of a repository
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.name={name}", f"it is no folder here, and the hub says: {reason}", fix) from error
