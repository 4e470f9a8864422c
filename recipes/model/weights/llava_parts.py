"""Load a LLaVA model whole, or its tower and its language model from weights that were published apart."""

import logging
from typing import Any

import torch
from torch import Tensor

from recipes.errors import ConfigError
from recipes.model.init import fill, unsharded_shape
from recipes.model.llava import Llava
from recipes.model.transformers_models import check_part, make_model_on_meta
from recipes.model.weights.files import PublishedWeights, check_head, locate, log_unread, open_weights
from recipes.model.weights.hf_any import check_rest, list_tensors, load_converted
from recipes.model.weights.huggingface import load_pretrained

log = logging.getLogger("lightning_recipes")

_TOWER, _DECODER, _HEAD = "model.vision_tower.", "model.language_model.", "lm_head."
# where files have the names of a tower, or of a decoder, before those of its modules
_IN_FILES = {_TOWER: ("vision_model.", "", "vision_tower.vision_model.", "vision_tower."), _DECODER: ("model.", "")}


@torch.no_grad()
def load(model: Llava, pretrained: str, *, seed: int) -> None:
    """Fill every parameter and buffer: of a model in parts, the projector and parts without weights from the seed.

    Args:
        model: Model with storage, sharded or not.
        pretrained: Folder or hub name of a whole model; not read of one in parts, which knows its own.
        seed: Seed of the run.

    Raises:
        ConfigError: There are no such weights, or they are of another model.
    """
    if model.is_whole:
        load_pretrained(model, pretrained)
        return
    parts = {_TOWER: model.vision_pretrained, _DECODER: model.language_pretrained}
    given = tuple(part for part, place in parts.items() if place is not None)
    given += (_HEAD,) if model.language_pretrained is not None else ()
    drawn = model.draw(seed, without=given)
    model.fill_drawn(drawn)
    for part, place in parts.items():
        if place is not None:
            _load_part(model, part, place)
    model.init_buffers()


def _load_part(model: Llava, part: str, place: str) -> None:
    """Fill a tower or a decoder, and the head of the latter."""
    inner: Any = model.inner
    key = f"model.{'vision' if part == _TOWER else 'language'}_pretrained"
    setting, fix = f"{key}={place}", f"{key}=<folder whose config.json describes its tensors>"
    folder = locate(place, key=key)
    config = inner.config.text_config if part == _DECODER else inner.config.vision_config
    check_part(config, folder, setting=setting)
    own = (part, _HEAD) if part == _DECODER else (part,)
    wanted = {name: tensor for name, tensor in list_tensors(inner).items() if name.startswith(own)}
    if part == _DECODER:
        check_head(folder, setting)
    with open_weights(folder) as weights:
        names = weights.names()
        found = {name: known for name in wanted if (known := _find(name, part, names)) is not None}
        if len(found) == len(wanted):
            if part == _DECODER:
                places = {_name_alone(name): known for name, known in found.items()}
                check_rest(make_model_on_meta(config), weights, places, place, setting=setting, fix=fix)
            else:
                log_unread(_list_unread_of_tower(weights, {*found.values()}), place)
            for name, weight in wanted.items():
                _set(model, weight, weights.read(found[name]), name=found[name], setting=setting)
            return
    missing = sorted({*wanted} - {*found})
    converted = load_converted(config, folder, setting)
    log.info(
        "%s names %d of %d tensors in another way (%s, …): transformers converted them, in host memory",
        *(place, len(missing), len(wanted), missing[0]),
    )
    for name, weight in wanted.items():
        known = _find(name, part, {*converted})
        if known is None:
            raise ConfigError(setting, f"it has no {name.removeprefix(part)}", fix)
        _set(model, weight, converted[known], name=known, setting=setting)


def _find(name: str, part: str, names: set[str]) -> str | None:
    """Return the name of a tensor in a file, or None."""
    if name.startswith(_HEAD):
        return name if name in names else None
    own = name.removeprefix(part)
    return next((f"{start}{own}" for start in _IN_FILES[part] if f"{start}{own}" in names), None)


def _name_alone(name: str) -> str:
    """Return the name of a tensor of the decoder in a language model of its own."""
    return name if name.startswith(_HEAD) else f"model.{name.removeprefix(_DECODER)}"


def _list_unread_of_tower(weights: PublishedWeights, read: set[str]) -> set[str]:
    """Return the tensors of a file that were not read and belong to the tower: its last layers, and pooling."""
    of_text = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")
    return {name for name in weights.names() - read if not name.startswith(of_text)}


def _set(model: Llava, weight: Tensor, values: Tensor, *, name: str, setting: str) -> None:
    """Fill a weight; one with rows for more tokens than the file has is extended by the mean of these."""
    shape = unsharded_shape(weight)
    if values.shape[1:] == shape[1:] and shape[0] == model.vocab_size and 0 < len(values) < shape[0]:
        mean = values.float().mean(dim=0, keepdim=True).to(values.dtype)  # [1, W]
        values = torch.cat([values, mean.expand(shape[0] - len(values), *shape[1:])])
    if values.shape != shape:
        reason = f"its {name} has the shape {tuple(values.shape)}, and its config.json describes {tuple(shape)}"
        fix = f"{setting.partition('=')[0]}=<folder whose config.json describes its tensors>"
        raise ConfigError(setting, reason, fix)
    fill(weight, values)
