"""Read published weights (safetensors or .bin, sharded or not) one tensor at a time."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from recipes.errors import ConfigError

# beside the weights: configs, licences, vocabularies of other libraries
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*", "USE_POLICY*"]
# all that readers look for in the folder of a model or an adapter, as patterns: in one file, sharded, or both formats
WEIGHT_FILES: tuple[str, ...] = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
WEIGHT_FILES += ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")
WEIGHT_FILES += ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
# in order of preference; each may also be sharded. Pickle comes last and is restricted to tensors.
_FILES = ("model.safetensors", "pytorch_model.bin")


def locate(name_or_folder: str) -> Path:
    """Return the folder, or the local copy of a hub repository, downloading it if necessary.

    Raises:
        ConfigError: Neither a folder with config.json nor a repository that can be downloaded.
    """
    folder = Path(name_or_folder).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.pretrained={name_or_folder}",
                "the folder has no config.json",
                "model.pretrained=<folder with config.json and model.safetensors>",
            )
        return folder
    try:
        from huggingface_hub import snapshot_download  # optional
    except ImportError as error:
        raise ConfigError(
            f"model.pretrained={name_or_folder}",
            "not a local folder, and the hub needs huggingface_hub",
            "pip install -e '.[huggingface]'",
        ) from error
    try:
        return _download(snapshot_download, name_or_folder)
    except (OSError, ValueError) as error:  # offline, unknown, gated, or not a repository name
        raise ConfigError(
            f"model.pretrained={name_or_folder}",
            f"not a local folder and the hub did not give it ({type(error).__name__}: {error})",
            "model.pretrained=<folder with config.json and model.safetensors>, or null",
        ) from error


def _download(snapshot_download: Any, name: str) -> Path:
    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(name, allow_patterns=[*SMALL_FILES, *patterns]))

    folder = fetch("model*.safetensors", "model.safetensors.index.json")
    if any(folder.glob("*.safetensors")):
        return folder
    return fetch("pytorch_model*.bin", "pytorch_model.bin.index.json")


def published_folder(name: str) -> Path | None:
    """Return the folder of a published model, or what the hub gave of it; None if neither is there any more."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download  # optional

        return Path(snapshot_download(name, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


class PublishedWeights:
    """Tensors of a checkpoint folder by name.

    Args:
        files: Maps each tensor name to an open file with `get_tensor(name)`.
    """

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = files

    def names(self) -> set[str]:
        """Return all tensor names."""
        return set(self._files)

    def read(self, name: str) -> Tensor:
        """Read one tensor to the CPU."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class _Pickle:
    """Mimics the `safe_open` interface for a .bin file; unpickles only tensors."""

    def __init__(self, file: Path) -> None:
        self._tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


@contextmanager
def open_weights(folder: Path) -> Iterator[PublishedWeights]:
    """Open every weight file in `folder`, reading only headers until `read` is called.

    Raises:
        ConfigError: There is no weight file, or a file listed in the index is missing.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for file in _weight_files(folder):
            if file.suffix == ".safetensors":
                opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            else:
                opened = _Pickle(file)
            files.update(dict.fromkeys(opened.keys(), opened))
        yield PublishedWeights(files)


def _weight_files(folder: Path) -> list[Path]:
    for name in _FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [file for file in files if not (folder / file).is_file()]
            if missing:
                raise ConfigError(
                    f"model.pretrained={folder}",
                    f"{index.name} names files that are missing: {', '.join(missing)}",
                    "model.pretrained=<a folder that is complete>",
                )
            return [folder / file for file in files]
    raise ConfigError(
        f"model.pretrained={folder}",
        "it has neither model.safetensors nor pytorch_model.bin, in one file or sharded",
        "model.pretrained=<folder with config.json and model.safetensors>",
    )
