"""Read published weights (safetensors or .bin, sharded or not) one tensor at a time, and the config.json beside them.

Whatever is wrong with such a file is one `ConfigError`: cut downloads, Git LFS pointers, lists instead of mappings.
"""

import json
import logging
import math
import os
import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor, nn

from recipes.errors import ConfigError, type_extra
from recipes.foreign_file import describe_error, missing_published, reading
from recipes.shipped_models import find_model

log = logging.getLogger("lightning_recipes")

# beside the weights: configs, licences, vocabularies of other libraries
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*", "USE_POLICY*"]
# all that readers look for in the folder of a model or an adapter, as patterns: in one file, sharded, or both formats
WEIGHT_FILES: tuple[str, ...] = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
WEIGHT_FILES += ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")
WEIGHT_FILES += ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
# in order of preference; each may also be sharded. Pickle comes last and is restricted to tensors.
_FILES = ("model.safetensors", "pytorch_model.bin")
_CONFIG = "config.json"
_WRAPPERS = re.compile(r"^module\.|_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
_OF_MODEL = ("state_dict", "model_state_dict", "model")  # under which training loops save a model beside other things
# names of a LightningModule that holds a published model as its attribute `model`
_OF_LIGHTNING = ("model.model.", "model.transformer.", "model.lm_head.")
# what GPTQ, AWQ, bitsandbytes and compressed-tensors save beside or instead of a weight
_QUANTIZED = re.compile(r"\.(qweight|qzeros|g_idx|SCB|absmax|quant_map|weight_packed|weight_scale(_inv)?)$")
# what peft adds to a model, and save_pretrained writes unless it was merged
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|ia3_l)\b")
# heads of transformers that give a class, a span or a score
_OF_OTHER_TASKS = re.compile(r"For(\w*Classification|QuestionAnswering|MultipleChoice|RewardModel\w*)$|RewardModel$")
_MAX_SHOWN = 100  # characters of a name in an error
_NUM_SHOWN = 3  # names of tensors in a line of the log
# dtypes that hold weights as they are; all others (int8, uint8, float8 …) need scales, which no reader here knows
_OF_WEIGHTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES_IN_HEADER = dict(zip(("F64", "F32", "F16", "BF16"), _OF_WEIGHTS, strict=True))  # of safetensors


def locate(name_or_folder: str, *, key: str = "model.pretrained") -> Path:
    """Return the folder, or the local copy of a hub repository, downloading it if necessary.

    Args:
        name_or_folder: As it was typed.
        key: The setting that names it.

    Raises:
        ConfigError: Neither a folder with config.json nor a repository that can be downloaded.
    """
    if (wrong := missing_published(name_or_folder, key)) is not None:
        raise wrong
    folder = Path(os.path.expanduser(name_or_folder))
    if os.path.isdir(folder):  # unlike Path.is_dir, False if the name is too long
        return folder
    try:
        from huggingface_hub import snapshot_download  # optional
    except ImportError as error:
        raise ConfigError(
            f"{key}={name_or_folder}",
            "not a local folder, and the hub needs huggingface_hub",
            type_extra("huggingface"),
        ) from error
    try:
        return _download(snapshot_download, name_or_folder)
    except (OSError, ValueError) as error:  # offline, unknown, gated, or not a repository name
        raise ConfigError(
            f"{key}={name_or_folder}",
            f"not a local folder, and it cannot be downloaded from the hub ({describe_error(error)})",
            f"{key}=<folder with config.json and model.safetensors>, or null",
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
    folder = Path(find_model(name))
    if os.path.isdir(folder):
        return folder
    try:
        from huggingface_hub import snapshot_download  # optional

        return Path(snapshot_download(name, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a published model.

    Raises:
        ConfigError: It is no JSON object.
    """
    return read_settings(folder / _CONFIG, f"model.pretrained={folder}")


def check_head(folder: Path, setting: str) -> None:
    """Check that the weights beside a config.json were not saved from a model with the head of another task.

    Args:
        folder: Folder with config.json.
        setting: The override that named it, `key=value`.

    Raises:
        ConfigError: They have no head that predicts the next token.
    """
    architectures = read_settings(folder / _CONFIG, setting).get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if isinstance(named, str) and _OF_OTHER_TASKS.search(named):
        reason = f"it holds a {named[:_MAX_SHOWN]}, which has another head than the one that predicts the next token"
        raise ConfigError(setting, reason, f"{_key(setting)}=<folder or hub id of a causal language model>")


def read_settings(path: Path, setting: str) -> dict[str, Any]:
    """Return the settings in a JSON file.

    Args:
        path: The file.
        setting: The override that named its folder, `key=value`.

    Raises:
        ConfigError: It is no JSON object.
    """
    fix = f"{_key(setting)}=<folder with a valid {path.name}>"
    with reading(path, setting, fix):
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(setting, f"its {path.name} holds a {type(found).__name__} instead of settings", fix)
    return found


class WeightFile:
    """One open file of tensors; only headers are read until `read` is called.

    Args:
        opened: A `safe_open`, or the tensors of a pickle by name.
        path: The file.
        setting: The override that named it, `key=value`.
    """

    def __init__(self, opened: Any, path: Path, setting: str) -> None:
        self._opened = opened
        self.path = path
        self._setting = setting
        in_file = list(opened.keys())
        plain = [_WRAPPERS.sub("", name) for name in in_file]
        if all(name.startswith("model.") for name in plain) and any(name.startswith(_OF_LIGHTNING) for name in plain):
            plain = [name.removeprefix("model.") for name in plain]
        self._names = dict(zip(plain if len({*plain}) == len(plain) else in_file, in_file, strict=True))

    def names(self) -> list[str]:
        """Return all tensor names, without what `torch.compile`, DDP, FSDP and others put before them."""
        return list(self._names)

    def _get(self, name: str) -> Tensor:
        own = self._names[name]
        found: Tensor = self._opened[own] if isinstance(self._opened, dict) else self._opened.get_tensor(own)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is in the header of a .safetensors file."""
        own = self._names[name]
        is_pickle = isinstance(self._opened, dict)
        return tuple(self._opened[own].shape if is_pickle else self._opened.get_slice(own).get_shape())

    def describe(self, name: str) -> tuple[torch.dtype | None, int]:
        """Return the dtype, None for one that holds no plain weights, and the number of values; reads the header."""
        own = self._names[name]
        if isinstance(self._opened, dict):
            return self._opened[own].dtype, self._opened[own].numel()
        part = self._opened.get_slice(own)
        return _DTYPES_IN_HEADER.get(part.get_dtype()), math.prod(part.get_shape())

    def hash(self, name: str) -> str:
        """Return a hash of the kind, shape and values of a tensor."""
        with reading(self.path, self._setting, copy_of(self._setting)):
            found = self._get(name)
            digest = xxhash.xxh3_128(f"{found.dtype} {[*found.shape]}".encode())
            digest.update(found.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def read(self, name: str, *, like: Tensor | None = None) -> Tensor:
        """Read one tensor to the CPU.

        Args:
            name: Name in the file.
            like: Tensor that it will fill, whose kind of values it must have; None: a weight.

        Raises:
            ConfigError: It cannot be read, or is quantized and its scales would be lost.
        """
        with reading(self.path, self._setting, copy_of(self._setting)):
            found = self._get(name)
        if found.layout != torch.strided or found.is_quantized or found.device.type != "cpu":
            reason = f"{self.path} holds {name} as a {found.layout} tensor on {found.device}, not as plain values"
            raise ConfigError(self._setting, reason, f"{_key(self._setting)}=<the same with plain values>")
        if like is None or like.dtype.is_floating_point:
            self._check_values(name, found)
        return found

    def _check_values(self, name: str, found: Tensor) -> None:
        """Check that a tensor holds finite floating-point numbers; 0.25 s per GB, a quarter of what reading takes."""
        if found.dtype not in _OF_WEIGHTS:
            dtype = str(found.dtype).removeprefix("torch.")
            is_quantized = found.dtype.itemsize == 1 and found.dtype != torch.bool
            why = (
                ": it is quantized, and its scales would be lost"
                if is_quantized
                else ", and weights are floating-point numbers"
            )
            reason = f"{self.path} holds {name} as {dtype}{why}"
            raise ConfigError(self._setting, reason, f"{_key(self._setting)}=<the same in float32 or bfloat16>")
        if found.numel() and not are_finite(found):
            reason = f"{self.path} holds NaN, inf or a value above float32 in {name}: every loss would be NaN"
            raise ConfigError(self._setting, reason, f"{_key(self._setting)}=<the same with finite values>")


def are_finite(values: Tensor) -> bool:
    """Return whether all values, of which there are some, are finite in float32."""
    least, most = values.aminmax()  # NaN if there is one; ten times as fast as isfinite
    return bool(torch.stack([least, most]).float().isfinite().all())


def copy_of(setting: str) -> str:
    """Return the advice for a file that is damaged or incomplete."""
    return f"{_key(setting)}=<a complete copy of it>"


def _key(setting: str) -> str:
    return setting.partition("=")[0]


class PublishedWeights:
    """Tensors of a checkpoint folder by name.

    Args:
        files: Maps each tensor name to its open file.
    """

    def __init__(self, files: Mapping[str, WeightFile]) -> None:
        self._files = files

    def names(self) -> set[str]:
        """Return all tensor names."""
        return set(self._files)

    def read(self, name: str, *, like: Tensor | None = None) -> Tensor:
        """Read one tensor to the CPU; see `WeightFile.read`."""
        return self._files[name].read(name, like=like)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._files[name].shape(name)

    def describe(self, name: str) -> tuple[torch.dtype | None, int]:
        """Return the dtype and the number of values of a tensor; see `WeightFile.describe`."""
        return self._files[name].describe(name)

    def hash(self) -> str:
        """Return a hash of all tensors by name, whichever files they are in."""
        digest = xxhash.xxh3_128()
        for name in sorted(self._files):
            digest.update(f"{name} {self._files[name].hash(name)}\n".encode())
        return digest.hexdigest()


def check_tied(weights: PublishedWeights, copy: str, source: str, setting: str) -> None:
    """Check that a tensor equals the one that it is tied to, so that leaving it out changes nothing.

    Raises:
        ConfigError: They differ: config.json says that they are tied, and the weights are those of a model without.
    """
    if not torch.equal(weights.read(copy), weights.read(source)):
        reason = f"config.json ties {copy} to {source}, but the file holds other values for each"
        raise ConfigError(setting, reason, 'the same command, with "tie_word_embeddings": false in its config.json')


def log_unread(names: Collection[str], published: str | Path) -> None:
    """Log which tensors of a file enter no model, such as saved masks and layers that predict further tokens."""
    if names:
        more = f", … ({len(names)} tensors)" if len(names) > _NUM_SHOWN else ""
        log.info("Not read from %s: %s%s", published, ", ".join(sorted(names)[:_NUM_SHOWN]), more)


@contextmanager
def open_file(path: Path, setting: str) -> Iterator[WeightFile]:
    """Open a .safetensors file, or a pickle, of which only tensors are unpickled.

    Args:
        path: The file.
        setting: The override that named it, `key=value`.

    Raises:
        ConfigError: It is damaged, or holds something else.
    """
    with ExitStack() as stack:
        with reading(path, setting, copy_of(setting)):
            if path.suffix == ".safetensors":
                opened: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                opened.keys()
            else:
                opened = _open_pickle(path, setting)
        yield WeightFile(opened, path, setting)


def _open_pickle(path: Path, setting: str) -> dict[str, Tensor]:
    """Return the tensors of a pickle by name, of the model alone if they are beside other things."""
    # files from before torch 1.6 are no archives and cannot be mapped into memory
    is_archive = zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals([Namespace]):  # timm's train.py saves its arguments beside the weights
            opened = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        what = describe_error(error)
        if "more than tensors" not in what:
            raise
        fix = f"{_key(setting)}=<the same in safetensors>"
        raise ConfigError(
            setting,
            f"{path}: {what}, and reading that may run code",
            f"{fix}, which model.save_pretrained(<folder>) writes where you trust the file",
        ) from error
    if isinstance(opened, Mapping):
        inner = next((opened[key] for key in _OF_MODEL if isinstance(opened.get(key), Mapping)), opened)
        if inner is not opened and (rest := sorted(str(key) for key in opened if opened[key] is not inner)):
            log.info("Not read from %s: %s", path, ", ".join(rest))
        others = [key for key, value in inner.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
        if not others:
            return dict(inner)
        reason = f"{path} holds {str(others[0])[:100]!r}, which is no tensor with a name"
    else:
        reason = f"{path} holds a {type(opened).__name__} instead of tensors by name"
    raise ConfigError(setting, reason, f"{_key(setting)}=<a copy of it whose file holds tensors by name alone>")


@contextmanager
def open_weights(folder: Path) -> Iterator[PublishedWeights]:
    """Open every weight file in `folder`, reading only headers until `read` is called.

    Raises:
        ConfigError: There is no weight file, one is damaged, or a file listed in the index is missing.
    """
    setting = f"model.pretrained={folder}"
    with ExitStack() as stack:
        files: dict[str, WeightFile] = {}
        for path in _weight_files(folder, setting):
            opened = stack.enter_context(open_file(path, setting))
            names = {*opened.names()}
            if twice := files.keys() & names:
                reason = f"{files[min(twice)].path.name} and {path.name} both hold {min(twice)}"
                raise ConfigError(setting, reason, copy_of(setting))
            if coded := sorted(name for name in names if _QUANTIZED.search(name)):
                reason = (
                    f"its weights are quantized ({path.name} holds {coded[0]}), and such weights are not trained here"
                )
                raise ConfigError(setting, reason, f"{_key(setting)}=<the same model in float32 or bfloat16>")
            if adapted := sorted(name for name in names if _ADAPTER.search(name)):
                reason = f"{path.name} holds {adapted[0]}, of an adapter that was not merged into the weights"
                fix = f"{_key(setting)}=<the model that merge_and_unload() of peft returns, saved by save_pretrained>"
                raise ConfigError(setting, reason, fix)
            files.update(dict.fromkeys(names, opened))
        yield PublishedWeights(files)


def hash_weights(name_or_folder: str) -> str:
    """Return a hash of the tensors of a published model, in whichever folder, format and number of files they are.

    0.1 s per GB in the page cache, where the files are just after they were loaded.

    Raises:
        ConfigError: The files are no longer there, or cannot be read.
    """
    folder = published_folder(name_or_folder)
    with open_weights(folder or Path(name_or_folder)) as weights:
        return weights.hash()


def hash_parts(places: Sequence[str]) -> str:
    """Return a hash of the tensors of a published model, or of those that a model is put together from, in order.

    Raises:
        ConfigError: The files are no longer there, or cannot be read.
    """
    hashes = [hash_weights(place) for place in places]
    return hashes[0] if len(hashes) == 1 else xxhash.xxh3_128("\n".join(hashes).encode()).hexdigest()


def list_places(model: nn.Module) -> tuple[str, ...]:
    """Return the folders or hub names of the weights that a model begins with; none of weights from a seed."""
    pretrained: str | None = getattr(model, "pretrained", None)
    places: tuple[str, ...] = getattr(model, "pretrained_parts", () if pretrained is None else (pretrained,))
    return places


def _weight_files(folder: Path, setting: str) -> list[Path]:
    for name in _FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if (folder / name).is_symlink() and not (folder / name).exists():
            reason = f"{name} is a link to {os.readlink(folder / name)}, which does not exist"
            raise ConfigError(setting, reason, copy_of(setting))
        if index.is_file():
            files = _read_index(index, setting)
            missing = [file for file in files if not os.path.isfile(folder / file)]
            if missing:
                reason = f"{index.name} names files that are missing: {', '.join(missing)}"
                raise ConfigError(setting, reason, copy_of(setting))
            return [folder / file for file in files]
    for name in _FILES:
        stem, _, suffix = name.partition(".")
        if shards := sorted(folder.glob(f"{stem}-*-of-*.{suffix}")):
            reason = f"it has shards ({shards[0].name}, …) without {name}.index.json, which lists them"
            raise ConfigError(setting, reason, copy_of(setting))
    raise ConfigError(
        setting,
        "it has neither model.safetensors nor pytorch_model.bin, in one file or sharded",
        "model.pretrained=<folder with config.json and model.safetensors>",
    )


def _read_index(index: Path, setting: str) -> list[str]:
    """Return the names of the files that an index lists, which must lie in its folder."""
    with reading(index, setting, copy_of(setting)):
        files: list[Any] = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for file in files:
        if not isinstance(file, str) or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            reason = f"{index.name} names {file!r}, which is no file of this folder"
            raise ConfigError(setting, reason, copy_of(setting))
    if not files:
        raise ConfigError(setting, f"{index.name} names no file", copy_of(setting))
    return files
