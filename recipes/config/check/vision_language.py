"""Check runs of models that read images among tokens: that the model is named in one way, and that images fit."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.config.published import read_llava_size
from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature
from recipes.data.found_files import describe_missing
from recipes.errors import ConfigError
from recipes.files import count
from recipes.foreign_file import missing_published

_READS_IMAGES = "reads_images"
_PLACE = "<image>"  # of an image in a prompt
_PROJECTOR = "multi_modal_projector"
_SIZES = ("image_token_id", "image_seq_length", "image_size", "in_channels", "vocab_size")
NULL_SIZES = tuple(f"model.{size}=null" for size in _SIZES)  # errors where the files that say them are not named
_PARTS = ("vision", "language")


def check_vision_language(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check a run whose task or model reads images among tokens."""
    model, choices = run.config["model"], run.choices
    reads = bool(find_signature(model["_target_"]).constants.get(_READS_IMAGES))
    if _READS_IMAGES in run.task.supports and not reads:
        reason = "it reads tokens alone, and the rows of this task hold images"
        typed = f"model={choices.get('model', '…')}"
        yield ConfigError(f"{typed} task={choices.get('task', '…')}", reason, "model=llava, or task=language_modeling")
    yield from _check_images_of_mode(run, reads=reads)
    if not reads:
        return
    yield from _check_unread(run)
    if run.mode.takes_steps and run.start_from is None and run.resume in (None, "auto"):
        for part in _PARTS:
            key = f"{part}_pretrained"
            place = model.get(key)
            if place is not None and (missing := missing_published(place, f"model.{key}")):
                yield missing
    yield from _check_projector(run)
    if model.get("image_token_id") == 0:
        reason = "rows are padded with token 0, and padding would take features of images"
        yield ConfigError("model.image_token_id=0", reason, "model.image_token_id=<another token>")
    length = model.get("image_seq_length")
    if isinstance(length, int) and run.seq_len is not None and run.seq_len <= length:
        reason = f"an image takes {length} tokens, and a row with one has no room for text"
        yield ConfigError(f"seq_len={run.seq_len}", reason, f"seq_len={2 * length}")


def _check_unread(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that no setting is typed that a whole model, or one that is put together, does not read."""
    model = run.config["model"]
    is_whole = model.get("name") is not None
    unread = ("vision_pretrained", "language_pretrained") if is_whole else ("pretrained",)
    for key in unread:
        if model.get(key) is None or f"model.{key}" in run.references:
            continue
        typed = f"model.name={model['name']} model.{key}={model[key]}" if is_whole else f"model.{key}={model[key]}"
        if is_whole:
            reason, fix = "a whole model has weights of all parts", f"model.pretrained={model[key]}"
        else:
            reason = "a model that is put together has the weights of its parts"
            fix = "model.vision_pretrained=… model.language_pretrained=…, or model.name=<a whole model>"
        yield ConfigError(typed, f"{reason}, and nothing would read it", fix)
    layer = model.get("vision_feature_layer")
    if is_whole and any(text.lstrip("+").startswith("model.vision_feature_layer=") for text in run.overrides):
        reason = "a whole model has the layer that its config.json names"
        fix = "the same command without model.vision_feature_layer, or model.vision and model.language"
        yield ConfigError(f"model.name={model['name']} model.vision_feature_layer={layer}", reason, fix)


def _check_images_of_mode(run: ResolvedRun, *, reads: bool) -> Iterator[ConfigError]:
    """Check that the images of a prompt are there, that the model reads them, and that the prompt has their places."""
    mode = run.config["mode"]
    image, prompt = mode.get("image"), str(mode.get("prompt", ""))
    files = [image] if isinstance(image, str) else [*(image or ())]
    typed = f"mode.image={image}" if isinstance(image, str) else f"mode.image=[{','.join(map(str, files))}]"
    if files and not reads:
        reason = "the model of that run reads text alone"
        yield ConfigError(typed, reason, "mode.image=null, or resume=<a run with model=llava>")
        return
    for file in files:
        path = Path(os.path.expanduser(str(file)))
        if not path.is_file():
            reason = "it is a folder" if path.is_dir() else describe_missing(path)
            yield ConfigError(f"mode.image={file}", reason, "mode.image=<file of an image>")
    num_places = prompt.count(_PLACE) if reads else 0
    if num_places and num_places != len(files):
        reason = f"it has {count(num_places, 'place')} for images, and there {_are(len(files))} in mode.image"
        fix = f"{count(num_places, 'file')} as mode.image, or a prompt without {_PLACE}, which the images are before"
        yield ConfigError(f"mode.prompt={prompt}", reason, fix)


def _are(number: int) -> str:
    return f"{'is' if number == 1 else 'are'} {number or 'none'}"


def _check_projector(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that a new projector is not frozen beside an adapter: nothing would ever learn to read images."""
    model, adapter = run.config["model"], run.config.get("adapter") or {}
    is_new = model.get("name") is None and run.start_from is None and run.resume in (None, "auto")
    saved = adapter.get("modules_to_save") or []
    is_trained = any(name.split(".")[-1] == _PROJECTOR for name in saved)
    if not run.mode.takes_steps or run.adapter is None or not is_new or is_trained:
        return
    reason = "the projector of a model that is put together is new, and would stay as the seed draws it"
    named = ",".join([*saved, _PROJECTOR])
    fix = f"adapter.modules_to_save=[{named}], or start_from=<a run that has trained one>"
    yield ConfigError(f"adapter={run.adapter} model.name=null", reason, fix)


def check_parts(model: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that a whole model is named or its parts are, and that their files say how large they are."""
    if not find_signature(model["_target_"]).constants.get(_READS_IMAGES):
        return
    name, parts = model.get("name"), {part: model.get(part) for part in _PARTS}
    given = [part for part, place in parts.items() if place is not None]
    if name is not None and given:
        fix = f"model.{given[0]}=null, or model.name=null"
        reason = "the first is a whole model, and the other a part of one that is put together"
        yield ConfigError(f"model.name={name} model.{given[0]}={parts[given[0]]}", reason, fix)
        return
    if name is None and (missing := [part for part in _PARTS if part not in given]):
        reason = f"a model is put together from a tower of images and a language model, and there is no {missing[0]}"
        shown = " ".join(f"model.{part}=<folder or hub id>" for part in missing)
        yield ConfigError(f"model.{missing[0]}=null", reason, f"{shown}, or model.name=<a whole model>")
        return
    try:
        unset = [size for size in _SIZES if model.get(size) is None]
        sizes = {size: read_llava_size(name, parts["vision"], parts["language"], size) for size in unset}
    except ConfigError as mistake:
        yield mistake
        return
    if None in sizes.values():
        source = "name" if name is not None else "vision"
        reason = "its config.json describes no tower of CLIP or SigLIP"
        yield ConfigError(f"model.{source}={model[source]}", reason, f"model.{source}=<one with such a tower>")
