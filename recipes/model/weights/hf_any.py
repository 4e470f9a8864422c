"""Load and save weights of any `transformers` model, one tensor at a time if the names match."""

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.errors import ConfigError
from recipes.foreign_file import reading
from recipes.model.init import fill, named_parameters, unsharded_shape
from recipes.model.transformers_models import (
    IMAGE_TEXT,
    VISION_LANGUAGE,
    VISION_TOWERS,
    find_class,
    make_model_on_meta,
    without_remarks,
)
from recipes.model.weights.files import (
    PublishedWeights,
    check_head,
    check_tied,
    copy_of,
    locate,
    log_unread,
    open_weights,
)
from recipes.numerics.deepspeed_import import without_warning_of_deepspeed

_FITTING = "model.name=<folder whose config.json describes its tensors>"

# arguments of from_pretrained with which `check_loaded` finds what does not fit, and transformers raises nothing
CHECKED_AFTERWARDS = {"output_loading_info": True, "ignore_mismatched_sizes": True}

# of files with a tower of LLaVA: what belongs to captions, a layer, and what pools the features of patches
_OF_TEXT = re.compile(r"text_model\.|text_projection\.|visual_projection\.|logit_(scale|bias)$")
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")
_POOLING = re.compile(r"(^|\.)head\.")

log = logging.getLogger("lightning_recipes")


def load_weights(inner: Any, name_or_folder: str, *, key: str) -> None:
    """Fill every parameter, and every buffer present in the files, from published weights.

    If tensor names match those of the model, tensors are read one by one. Otherwise transformers loads and converts the
    files, which takes host memory for all weights in every process.

    Args:
        inner: `transformers` model on the device of the run, sharded or not.
        name_or_folder: Folder with config.json and weights, or a hub name.
        key: The setting that names it, `model.name` or `model.pretrained`.

    Raises:
        ConfigError: The weights are missing or belong to a different model.
    """
    folder = locate(name_or_folder)
    if inner.config.model_type not in IMAGE_TEXT:
        check_head(folder, f"{key}={name_or_folder}")
    wanted = list_tensors(inner)
    prefix = f"{inner.base_model_prefix}."
    with open_weights(folder) as weights:
        names = weights.names()
        found = {name: own for name in wanted for own in (name, name.removeprefix(prefix)) if own in names}
        if len(found) == len(wanted):
            check_rest(inner, weights, found, name_or_folder, setting=f"model.pretrained={name_or_folder}")
            for name, tensor in wanted.items():
                _set(tensor, weights.read(found[name], like=tensor), found[name], name_or_folder)
            return
        likes = {own: wanted[name] for name, own in found.items()}
        for name in names:
            if not _is_ignored(inner, name):  # transformers would take quantized ones and NaN for weights
                weights.read(name, like=likes.get(name))
    missing = [name for name in wanted if name not in found]
    converted = load_converted(inner.config, folder, f"model.pretrained={name_or_folder}")
    # a head that is tied to the embedding is none of its tensors, unless the file holds other values for it
    for lines, others in (("it has no", {*wanted} - {*converted}), ("it also has", {*converted} - {*wanted})):
        if others:
            reason = f"{lines} {_list(others)}"
            raise ConfigError(f"model.pretrained={name_or_folder}", reason, _FITTING)
    log.info(
        "%s names %d of %d tensors in another way (%s, …): transformers converted them, in host memory",
        *(name_or_folder, len(missing), len(wanted), missing[0]),
    )
    for name, tensor in wanted.items():
        _set(tensor, converted[name], name, name_or_folder)


def list_tensors(inner: Any) -> dict[str, Tensor]:
    """Return the tensors that weight files contain: base parameters (tied ones once) and persistent buffers."""
    saved = inner.state_dict()
    buffers = {name: buffer for name, buffer in inner.named_buffers() if name in saved}
    return dict(named_parameters(inner)) | buffers


def _set(tensor: Tensor, values: Tensor, name: str, published: str) -> None:
    shape = unsharded_shape(tensor)
    if not values.dim() and shape == (1,):  # see `save_weights`
        values = values[None]
    if values.shape != shape:
        reason = f"its {name} has the shape {tuple(values.shape)}, and its config.json describes {tuple(shape)}"
        raise ConfigError(f"model.pretrained={published}", reason, _FITTING)
    fill(tensor, values)


def check_rest(
    inner: Any,
    weights: PublishedWeights,
    found: Mapping[str, str],
    published: str,
    *,
    setting: str,
    fix: str = _FITTING,
) -> None:
    """Reject leftover weights, which mean that the files are quantized or belong to a different model.

    Args:
        inner: `transformers` model; on any device.
        weights: The files.
        found: Names in the files by those of the model.
        published: Folder or hub name of the files, as it was typed.
        setting: The override that named them, `key=value`.
        fix: What to type for files with tensors that have no place.

    Raises:
        ConfigError: A tensor has no place, or a head that should be the embedding has other values.
    """
    rest = weights.names() - {*found.values()}
    for copy, source in inner.all_tied_weights_keys.items():
        if copy in rest and source in found:
            check_tied(weights, copy, found[source], setting)
            rest.remove(copy)
    unknown = {name for name in rest if not _is_ignored(inner, name)}
    if unknown:
        reason = f"it has {_list(unknown)}, for which the model has no place"
        raise ConfigError(setting, reason, fix)
    log_unread(rest, published)


def _is_ignored(inner: Any, name: str) -> bool:
    """Return whether transformers, too, does without a tensor of a file: saved masks, frequencies, further heads."""
    ignored = [*(inner._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"attn\.(masked_)?bias$"]
    ignored.append(r"embeddings\.position_ids$")
    return _is_unread(inner.config, name) or any(re.search(pattern, name) for pattern in ignored)


def _list(names: Collection[str]) -> str:
    return min(names) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def load_converted(config: Any, folder: Path, setting: str) -> dict[str, Tensor]:
    """Return the tensors of a published model by the names of transformers, which loads and converts the files.

    Args:
        config: Configuration of the model; of a tower of LLaVA without the layers that nobody reads.
        folder: Folder with config.json and weights.
        setting: The override that named it, `key=value`.

    Raises:
        ConfigError: The weights are damaged or belong to a different model.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, **CHECKED_AFTERWARDS}
    options["attn_implementation"] = "eager"  # config.json may name one of a package that is not installed
    if config.model_type in (*VISION_LANGUAGE, *VISION_TOWERS):
        options["config"] = config
    with without_progress_bars(), without_remarks(), reading(folder, setting, copy_of(setting)):
        whole, report = find_class(config).from_pretrained(str(folder), **options)
    unread = {name for name in map(str, report["unexpected_keys"]) if _is_unread(config, name)}
    report["unexpected_keys"] = {*map(str, report["unexpected_keys"])} - unread
    check_loaded(report, setting, fitting=_FITTING)
    return {name: tensor.detach() for name, tensor in list_tensors(whole).items()}


def _is_unread(config: Any, name: str) -> bool:
    """Return whether a tensor is of a part of a tower that a LLaVA model does not compute, or not of the tower."""
    if config.model_type not in (*VISION_LANGUAGE, *VISION_TOWERS):
        return False
    is_whole = config.model_type in VISION_LANGUAGE
    if not is_whole and _OF_TEXT.match(name):
        return True
    if is_whole and "vision_tower" not in name:
        return False
    number = config.vision_config.num_hidden_layers if is_whole else config.num_hidden_layers
    layer = _LAYER.search(name)
    return _POOLING.search(name) is not None or (layer is not None and int(layer[1]) >= number)


def check_loaded(report: Mapping[str, Collection[Any]], setting: str, *, fitting: str) -> None:
    """Check that transformers filled a whole model with all tensors of a file, and initialized none randomly.

    Args:
        report: Its `output_loading_info`, of a model loaded with `CHECKED_AFTERWARDS`.
        setting: The override that named the file, `key=value`.
        fitting: What to type instead of a file that is of another model.

    Raises:
        ConfigError: Tensors are missing, have another shape, or were left out.
    """
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        reason = f"its {name} has the shape {tuple(found)}, and its settings describe {tuple(wanted)}"
        raise ConfigError(setting, reason, fitting)
    missing, unexpected = ({str(name) for name in report[key]} for key in ("missing_keys", "unexpected_keys"))
    if missing and unexpected:
        raise ConfigError(setting, f"its files do not have {_list(missing)}, but {_list(unexpected)}", fitting)
    if missing:
        raise ConfigError(setting, f"its files do not have {_list(missing)}", copy_of(setting))
    if unexpected:
        raise ConfigError(setting, f"it has {_list(unexpected)}, for which the model has no place", fitting)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars, which a log file would hold line by line."""
    from transformers.utils import logging as of_transformers

    was_enabled = of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            of_transformers.enable_progress_bar()


def save_weights(inner: Any, folder: Path) -> None:
    """Write weights and config in the format of `transformers`, then load them and compare them with the model.

    Scalars, which are of shape [1] here because engines shard the first axis, are written as transformers has them.

    Args:
        inner: Unsharded model.
        folder: Created if necessary.

    Raises:
        OSError: The files cannot be written, or differ when read back.
    """
    theirs = make_model_on_meta(inner.config).state_dict()
    own: dict[str, Tensor] = inner.state_dict()
    scalars = {name for name, tensor in own.items() if tensor.dim() and not theirs[name].dim()}
    as_theirs = {name: tensor[0] if name in scalars else tensor for name, tensor in own.items()} if scalars else None
    with without_progress_bars(), without_warning_of_deepspeed():
        inner.save_pretrained(folder, state_dict=as_theirs)
    loaded = load_converted(inner.config, folder, f"model.pretrained={folder}")
    for name, tensor in list_tensors(inner).items():
        values = tensor[0] if name in scalars else tensor
        if name not in loaded or not torch.equal(loaded[name].float(), values.detach().cpu().float()):
            raise OSError(f"{folder}: {name} reads back differently")
