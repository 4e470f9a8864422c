"""Load weights that timm publishes or has trained, by timm's own code, and write a folder that timm loads.

A folder has config.json and model.safetensors, as in a repository of the hub; a file has the tensors alone, or the
checkpoint of timm's `train.py`. They are read whole, in the host's memory of each process: timm fits old names, the
channels of the first convolution and position embeddings of another image size to the model, with all tensors at hand.
"""

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.model.dual_encoder import DualEncoder, naming_image_tower
from recipes.model.timm_model import TimmModel, import_timm, make_timm
from recipes.model.weights.any_module import list_weights
from recipes.model.weights.files import (
    PublishedWeights,
    WeightFile,
    locate,
    open_file,
    open_weights,
    read_config,
)

log = logging.getLogger("lightning_recipes")

CONFIG = "config.json"
_COUNTED, _COUNT = (".num_batches_tracked", "_index"), torch.zeros((), dtype=torch.int64)  # whole numbers in a file
_OF_SOURCE = (
    "architecture",
    "first_conv",
    "classifier",
    "input_size",
    "fixed_input_size",
    "label_offset",
    "num_classes",
)
_NUM_SHOWN = 3  # tensors in a line of the log
_MAX_SHOWN = 300  # characters of what torch says


@torch.no_grad()
def load_pretrained(model: TimmModel, place: str, *, seed: int) -> None:
    """Fill a model from published weights; a head of another number of classes keeps its initial weights.

    Args:
        model: Model with storage, sharded or not.
        place: A file, a folder, or a repository of the hub.
        seed: Seed of the new head.

    Raises:
        ConfigError: There are no such weights, or they are of another model.
    """
    setting = f"model.pretrained={place}"
    saved, described = _read(place, setting)
    _check_architecture(model.name, described, setting)
    whole: Any = model.draw(seed)
    classes = _count_classes(whole, saved, described)
    overlay = {key: described[key] for key in _OF_SOURCE if key in described}
    overlay |= {"state_dict": dict(saved), "custom_load": False, "num_classes": classes}
    if "input_size" not in described and (channels := _count_channels(whole, saved, model.in_channels)) is not None:
        overlay["input_size"] = (channels, *whole.pretrained_cfg["input_size"][1:])
    source = _fill_source(model, classes, overlay, setting)
    fitting = {name: value for name, value in source.state_dict().items() if _fits(value, whole.state_dict().get(name))}
    new = [name for name in whole.state_dict() if name not in fitting]
    whole.load_state_dict(fitting, strict=False)
    model.fill_from(whole)
    resized = [
        f"{name} {[*saved[name].shape]} -> {[*value.shape]}"
        for name, value in fitting.items()
        if name in saved and saved[name].shape != value.shape
    ]
    if new:
        log.info(
            "%s is of %d classes, and model.num_classes=%d: %s are new", place, classes, model.num_classes, _list(new)
        )
    if resized:
        log.info("timm has fitted tensors of %s to the model: %s", place, _list(resized))


def load_tower(model: DualEncoder, place: str, *, seed: int) -> None:
    """Fill the tower of images from published weights, and draw all else; arguments as for `load_pretrained`."""
    with naming_image_tower():
        load_pretrained(model.image, place, seed=seed)
    model.init_beside_images(seed)


def why_no_folder(model: nn.Module) -> str | None:
    """Return why timm does not load a model; None if it does."""
    if not isinstance(model, TimmModel):
        return f"timm has no {type(model).__name__}"
    if model.norm == "group":
        return f"{model.name} has batch norms in timm, and those of model.norm=group here"
    return None


def export_folder(
    model: TimmModel, folder: Path, *, class_names: Sequence[str] | None, preprocessing: Mapping[str, Any]
) -> None:
    """Write config.json and model.safetensors, which `timm.create_model("local-dir:…", pretrained=True)` loads.

    Args:
        model: Unsharded model.
        folder: Existing folder.
        class_names: Names of the outputs; None: they have none.
        preprocessing: What timm's `resolve_data_config` shall find there, such as `input_size`, `mean` and `std`.

    Raises:
        OSError: The files cannot be written, or timm reads other values.
    """
    timm = import_timm()
    tensors = {
        name.removeprefix("inner."): tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in list_weights(model).items()
    }
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        whole: Any = make_timm(model.name, model.settings)
        whole.load_state_dict(tensors, assign=True)
        described = {} if class_names is None else {"label_names": [*class_names]}
        timm.models.save_for_hf(
            whole, folder, model_config=described, safe_serialization=True, data_config=dict(preprocessing)
        )
        again = timm.create_model(f"local-dir:{folder}", pretrained=True).state_dict()
    for name, tensor in tensors.items():
        if name not in again or not torch.equal(again[name].to(tensor.dtype), tensor):
            raise OSError(f"{folder}: timm reads {name} differently")


def _read(place: str, setting: str) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Return the tensors by name, and what config.json says of them, with `architecture`; empty: there is none."""
    with ExitStack() as stack:
        path = Path(os.path.expanduser(place))
        if os.path.isfile(path):
            opened = stack.enter_context(open_file(path, setting))
            return _read_all(opened, opened.names()), {}
        folder = locate(place)
        weights = stack.enter_context(open_weights(folder))
        saved = _read_all(weights, sorted(weights.names()))
    if not (folder / CONFIG).is_file():
        return saved, {}
    config = read_config(folder)
    described: Any = config.get("pretrained_cfg", config)
    if not isinstance(described, dict) or not isinstance(config.get("architecture"), str):
        reason = "its config.json does not say which model of timm it is of"
        raise ConfigError(setting, reason, "model.pretrained=<a folder or repository of timm, or a file of weights>")
    described = described | {key: config[key] for key in ("architecture", "num_classes") if key in config}
    return saved, described


def _read_all(weights: WeightFile | PublishedWeights, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: weights.read(name, like=_COUNT if name.endswith(_COUNTED) else None) for name in names}


def _check_architecture(name: str, described: Mapping[str, Any], setting: str) -> None:
    own, theirs = name.partition(".")[0], described.get("architecture", name).partition(".")[0]
    if own != theirs:
        reason = f"its config.json describes a {theirs}"
        raise ConfigError(f"model.name={name} {setting}", reason, f"model.name={theirs}")


def _list_heads(whole: Any) -> list[str]:
    """Return the names of the modules that return the outputs."""
    named = whole.pretrained_cfg.get("classifier") or ()
    return [named] if isinstance(named, str) else [*named]


def _count_classes(whole: Any, saved: Mapping[str, Tensor], described: Mapping[str, Any]) -> int:
    """Return the number of classes of saved weights, 0 if they have no head."""
    if "num_classes" in described:
        return int(described["num_classes"])
    shapes = [saved[f"{name}.weight"].shape[0] for name in _list_heads(whole) if f"{name}.weight" in saved]
    return shapes[0] if shapes else int(whole.pretrained_cfg["num_classes"])


def _count_channels(whole: Any, saved: Mapping[str, Tensor], channels: int) -> int | None:
    """Return the channels of the images that weights were trained with; None: they have no convolution of that name.

    Args:
        whole: Model of timm.
        saved: The weights.
        channels: Channels of its images.
    """
    first = whole.pretrained_cfg.get("first_conv")
    if not isinstance(first, str) or f"{first}.weight" not in saved:
        return None
    # a stem may rearrange pixels into channels first
    in_model: int = whole.get_submodule(first).weight.shape[1]
    return saved[f"{first}.weight"].shape[1] * channels // in_model


def _fill_source(model: TimmModel, classes: int, overlay: Mapping[str, Any], setting: str) -> nn.Module:
    """Return timm's model with all saved tensors, and the head that they have.

    Raises:
        ConfigError: timm cannot fit them to the model.
    """
    settings = dict(model.settings) | {"num_classes": classes}
    try:
        with torch.device("cpu"):
            return make_timm(model.name, settings, pretrained=True, pretrained_cfg_overlay=dict(overlay))
    except (RuntimeError, KeyError) as error:
        names = str(error).partition(":\n\t")[2] or f"it has no {error}"
        said = " ".join(names.split())[:_MAX_SHOWN]
        fix = "the model.name, model.image_size and model.arguments that it was trained with"
        raise ConfigError(
            f"model.name={model.name} {setting}", f"timm cannot fit it to the model: {said}", fix
        ) from error


def _fits(value: Tensor, own: Tensor | None) -> bool:
    return own is not None and own.shape == value.shape


def _list(names: Collection[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join([*names][:_NUM_SHOWN]) + more
