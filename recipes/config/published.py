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
from recipes.shipped_models import find_model

_FILE, _TOKENS = "config.json", "tokenizer.json"
_MAX_SHOWN = 100  # characters of a value in an error
_NESTED = ("text_config", "vision_config")  # in models of several towers
# what transformers (5.24) takes for a size that the file of such a model leaves out, as it writes no defaults
_DEFAULTS = {
    "clip": {"vocab_size": 49408, "max_position_embeddings": 77, "image_size": 224, "num_channels": 3},
    "siglip": {"vocab_size": 32000, "max_position_embeddings": 64, "image_size": 224, "num_channels": 3},
}
# of towers, whose model_type a file may leave to that of the whole model; and of a LLaVA model that names none
_KIND_OF_TOWER = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
_TOWERS = {
    "clip_vision_model": {"image_size": 224, "patch_size": 32, "num_channels": 3},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16, "num_channels": 3},
}
_TOWER_OF_LLAVA = {"image_size": 336, "patch_size": 14, "num_channels": 3}
_OF_TOKENS = ("image_token_id", "vocab_size")
_MULTIPLE = 64
IMAGE_TOKEN = "<image>"  # in a text, and in a vocabulary
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


def llava_size(name: str | None, vision: str | None, language: str | None, key: str) -> int | None:
    """Return a size of a model that reads images among tokens; `${llava_size:…}` in conf/.

    Args:
        name: Folder or hub name of a whole model; None: of its parts.
        vision: The same of the model with its tower of images.
        language: The same of its language model.
        key: `image_size`, `in_channels`, `image_seq_length`, `image_token_id` or `vocab_size`.

    Returns:
        None if a file or key does not exist; the config check reports the reason.
    """
    try:
        return read_llava_size(name, vision, language, key)
    except ConfigError:
        return None


def read_llava_size(name: str | None, vision: str | None, language: str | None, key: str) -> int | None:
    """Return the same size, or raise the reason why it is missing; None if what names the model is missing.

    Raises:
        ConfigError: There is no such file, or it is damaged.
    """
    if name is not None:
        config = _read_config(name, "model.name")
        if (kind := config.get("model_type")) != "llava":
            reason = f"a model of type {kind} is no LLaVA model, which reads images among tokens"
            fix = "model.name=<folder or hub id of a LLaVA model>, or model.vision=<a tower> model.language=<a model>"
            raise ConfigError(f"model.name={name}", reason, fix)
        if key in _OF_TOKENS:
            return _read_tokens(config, key)
    elif key in _OF_TOKENS:
        return None if language is None else _read_tokens_of(language, key)
    elif vision is None:
        return None
    else:
        config = _read_config(vision, "model.vision")
    tower = config.get("vision_config") or ({} if name else config)
    kind = str(tower.get("model_type", _KIND_OF_TOWER.get(str(config.get("model_type")))))
    sizes = (_TOWER_OF_LLAVA if name else _TOWERS.get(kind, {})) | {
        its: value for its in ("image_size", "patch_size", "num_channels") if isinstance(value := tower.get(its), int)
    }
    if key in ("image_size", "in_channels"):
        return sizes.get("image_size" if key == "image_size" else "num_channels")
    if not sizes.get("patch_size"):
        return None
    has_class_token = kind != "siglip_vision_model"
    is_dropped = config.get("vision_feature_select_strategy", "default") == "default" if name else has_class_token
    return int((sizes["image_size"] // sizes["patch_size"]) ** 2) + has_class_token - is_dropped


def _read_tokens(config: dict[str, Any], key: str) -> int:
    """Return the id of the token of images of a LLaVA model, or the number of its tokens."""
    if key == "vocab_size":
        return int((config.get("text_config") or {}).get("vocab_size", 32000))
    return int(config.get("image_token_index", config.get("image_token_id", 32000)))


def _read_tokens_of(language: str, key: str) -> int:
    """Return the id of the token of images that a language model is given, or the number of tokens with it.

    It is the one that its tokenizer has, else the next one after those of its tokenizer. Where the vocabulary of the
    model ends before it, it is extended to a multiple of 64, for which products are fast.
    """
    config = _read_config(language, "model.language")
    size = config.get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        reason = f"its {_FILE} has no vocab_size, which every language model has"
        raise ConfigError(f"model.language={language}", reason, "model.language=<a causal language model>")
    token = _find_image_token(language, size)
    if key == "image_token_id":
        return token
    return size if token < size else -(-(token + 1) // _MULTIPLE) * _MULTIPLE


def _find_image_token(language: str, size: int) -> int:
    folder = find_model(language)
    file = Path(folder, _TOKENS) if os.path.isdir(folder) else _find_on_hub(language, _TOKENS)
    if isinstance(file, ConfigError):
        raise _named(file, "model.language")
    if file is None or not file.is_file():
        return size
    with reading(file, f"model.language={language}", f"model.language=<folder with a valid {_TOKENS}>"):
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        added = {str(each["content"]): int(each["id"]) for each in found.get("added_tokens") or []}
        vocabulary = (found.get("model") or {}).get("vocab") or {}
        # that of a unigram model is a list
        known = (
            dict(vocabulary) if isinstance(vocabulary, dict) else {each[0]: id for id, each in enumerate(vocabulary)}
        )
    known |= added
    return known.get(IMAGE_TOKEN, max(known.values(), default=size - 1) + 1)


def read_size(name: str, key: str) -> int:
    """Return the same size, or raise the reason why it is missing.

    Raises:
        ConfigError: There is no such file, or it lacks the key.
    """
    config = _read_config(name, "model.name")
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


def _read_config(name: str, setting: str) -> dict[str, Any]:
    """Return the config.json in a folder, or in a repository on the hub.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    folder = find_model(name)
    # unlike Path.is_dir, False if the name is too long
    file = Path(folder, _FILE) if os.path.isdir(folder) else _find_on_hub(name)
    if isinstance(file, ConfigError):
        raise _named(file, setting)
    if file is None or not os.path.lexists(file):
        raise missing_config(name, setting)
    with reading(file, f"{setting}={name}", f"{setting}=<folder with a valid {_FILE}>"):
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"a {type(config).__name__} instead of settings")
    return config


def _named(mistake: ConfigError, setting: str) -> ConfigError:
    """Return a mistake about `model.name` as one about another setting."""
    said = (text.replace("model.name", setting) for text in (mistake.setting, mistake.reason, mistake.fix))
    return ConfigError(*said)


@functools.cache
def _find_on_hub(name: str, own: str = _FILE) -> Path | ConfigError | None:
    """Return a file of a repository, or why it cannot be read; None if the repository has none of that name."""
    if (wrong := missing_folder(name, "model.name")) is not None:
        return wrong
    try:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        reason = "not a local folder, and the hub needs huggingface-hub, which is not installed"
        return ConfigError(f"model.name={name}", reason, type_extra("huggingface"))
    host = str(urlsplit(constants.ENDPOINT).hostname)
    is_found = _is_found(host)  # else the hub library retries for half a minute
    try:
        return Path(hf_hub_download(name, own, local_files_only=not is_found))
    except (OSError, ValueError) as error:  # offline, unknown, gated, or not a repository name
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError) and own != _FILE:
            return None
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
