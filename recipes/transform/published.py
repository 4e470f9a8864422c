"""What published models read: the pixels, mean and deviation of timm's weights, and of a CLIP or SigLIP model.

Shapes: C channels, S x S pixels of a sample.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recipes.errors import ConfigError, type_extra
from recipes.foreign_file import describe_error, reading
from recipes.shipped_models import find_model
from recipes.torchvision_import import repair

Interpolation = Literal["nearest", "bilinear", "bicubic"]
# as most models that are trained on ImageNet
IMAGENET: dict[str, Any] = {
    "size": 224,
    "eval_crop": 0.875,
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_mode": "center",
}
_CONFIG, _PROCESSORS = "config.json", ("preprocessor_config.json", "processor_config.json")
_FILES = (_CONFIG, *_PROCESSORS)
_TIMM_PREFIXES = ("hf_hub:", "hf-hub:", "local-dir:")  # of names with a slash that are timm's
INTERPOLATIONS: dict[int, Interpolation] = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # by Pillow's number
_LLAVA, _SIZE_OF_LLAVA = "llava", 336
# type of model that a tower is from -> what its image processor does where no file says it (transformers 5)
_OF_TYPES: dict[str, dict[str, Any]] = {
    "clip": IMAGENET
    | {
        "eval_crop": 1.0,
        "mean": (0.48145466, 0.4578275, 0.40821073),
        "std": (0.26862954, 0.26130258, 0.27577711),
    },
    "siglip": IMAGENET | {"eval_crop": 1.0, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "crop_mode": "squash"},
}


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """What a model reads: S x S pixels of each channel, of which the mean is subtracted before the deviation divides.

    Attributes:
        size: S of training.
        eval_size: S of validation.
        eval_crop: S of validation over the shorter side of the resized image.
        interpolation: Of everything that is resized.
        mean: [C], of 0 to 1.
        std: [C].
        crop_mode: Whether a validation sees the `center`, or all of the image as a square, `squash`.
    """

    size: int
    eval_size: int
    eval_crop: float
    interpolation: Interpolation
    mean: Sequence[float]
    std: Sequence[float]
    crop_mode: Literal["center", "squash"]


def read_published(model: str | None) -> tuple[dict[str, Any], str]:
    """Return what the published weights of a model read, ImageNet's without such weights; and whose it is.

    Args:
        model: A name of timm; or a folder or a repository of the hub with a CLIP, SigLIP or LLaVA model of
            transformers; None: no published model.

    Raises:
        ConfigError: There is no such model, or a file of it is damaged.
    """
    if model is None:
        return IMAGENET, "usual for ImageNet"
    if os.path.isdir(find_model(model)) or ("/" in model and not model.startswith(_TIMM_PREFIXES)):
        return _read_transformers(model)
    return _read_timm(model)


def _read_timm(model: str) -> tuple[dict[str, Any], str]:
    repair()
    try:
        import timm
    except ImportError:
        return IMAGENET, "usual for ImageNet, because timm is not installed"
    try:
        known = timm.get_pretrained_cfg(model)
    except RuntimeError as error:  # of a tag that it does not know
        raise ConfigError(
            f"model.name={model}", str(error).rstrip("."), f"model.name={model.partition('.')[0]}"
        ) from error
    if known is None or known.input_size is None:
        return IMAGENET, f"usual for ImageNet, because timm publishes no weights of {model}"
    given = {
        "size": known.input_size[-1],
        "eval_crop": known.crop_pct,
        "interpolation": known.interpolation,
        "mean": known.mean,
        "std": known.std,
        "crop_mode": "squash" if known.crop_mode == "squash" else "center",
    }
    return given, f"published with timm's {'.'.join(filter(None, (known.architecture, known.tag)))}"


def _read_transformers(model: str) -> tuple[dict[str, Any], str]:
    """Return what a CLIP or SigLIP model reads: its size by config.json, all else by the settings of its processor.

    LLaVA's models read what the tower in them does.
    """
    folder = _find_folder(model)
    config = _read_json(folder / _CONFIG, model)
    vision = config.get("vision_config") or (config if "image_size" in config else {})
    kind = _find_kind(config, vision)
    if kind not in _OF_TYPES:
        return IMAGENET, f"usual for ImageNet, because {model} is no CLIP, SigLIP or LLaVA model"
    given = dict(_OF_TYPES[kind])
    file = next((folder / name for name in _PROCESSORS if (folder / name).is_file()), None)
    origin = f"usual for {kind}, because there is no {_PROCESSORS[0]} in {model}"
    if file is not None:
        found = _read_json(file, model)
        with reading(file, f"model.name={model}", "'transform.model=null' with transform.mean, std and size"):
            given |= _read_processor(found.get("image_processor", found))
        origin = f"published with {model}"
    default = _SIZE_OF_LLAVA if config.get("model_type") == _LLAVA and not vision else IMAGENET["size"]
    return given | {"size": int(vision.get("image_size", default))}, origin


def _find_kind(config: Mapping[str, Any], vision: Mapping[str, Any]) -> str:
    """Return the kind of model whose tower reads the images: of LLaVA, CLIP unless it says otherwise."""
    kind = str(config.get("model_type"))
    if kind == _LLAVA:
        kind = str(vision.get("model_type", "clip"))
    return kind.removesuffix("_vision_model")


def _read_processor(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the settings of an image processor of transformers say."""
    found: dict[str, Any] = {}
    for name, key in (("mean", "image_mean"), ("std", "image_std")):
        if settings.get(key) is not None:
            found[name] = tuple(map(float, settings[key]))
    if settings.get("resample") is not None:
        found["interpolation"] = INTERPOLATIONS[settings["resample"]]
    size, crop = settings.get("size"), settings.get("crop_size")
    cropped = crop.get("height") if isinstance(crop, dict) else crop
    if isinstance(size, dict) and "height" in size:
        is_cropped = cropped and settings.get("do_center_crop", False)
        return found | {"crop_mode": "squash", "eval_crop": cropped / size["height"] if is_cropped else 1.0}
    shorter = size.get("shortest_edge") if isinstance(size, dict) else size
    if shorter and cropped and settings.get("do_center_crop", True):
        found |= {"crop_mode": "center", "eval_crop": cropped / shorter}
    return found


def _find_folder(model: str) -> Path:
    """Return the folder of a published model, downloading its settings if it is one of the hub.

    Raises:
        ConfigError: It is neither.
    """
    folder = Path(find_model(model))
    if folder.is_dir():
        return folder
    setting, fix = f"model.name={model}", f"model.name=<folder with {_CONFIG}, or another hub id>"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        reason = "not a local folder, and the hub needs huggingface-hub, which is not installed"
        raise ConfigError(setting, reason, type_extra("huggingface")) from error
    try:
        return Path(snapshot_download(model, allow_patterns=[*_FILES]))
    except (OSError, ValueError) as error:  # offline, unknown, gated, or not a repository name
        reason = f"not a local folder, and it cannot be downloaded from the hub ({describe_error(error)})"
        raise ConfigError(setting, reason, fix) from error


def _read_json(file: Path, model: str) -> dict[str, Any]:
    fix = f"model.name=<folder with a valid {file.name}>"
    with reading(file, f"model.name={model}", fix):
        found = json.loads(file.read_text(encoding="utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError("it does not hold an object")
        return found
