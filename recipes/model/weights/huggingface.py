"""Load and export weights in the format of `transformers`: one tensor at a time to load, one full copy to export."""

import json
import logging
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.errors import ConfigError, type_setting
from recipes.files import filling
from recipes.foreign_file import reading
from recipes.model.gpt2 import GPT2
from recipes.model.huggingface import OfTransformers
from recipes.model.image_text import TransformersImageText
from recipes.model.init import fill, named_buffers, named_parameters
from recipes.model.llama import Llama
from recipes.model.llava import Llava
from recipes.model.moe import DeepSeekV3, MoeLlama
from recipes.model.transformers_models import (
    check_kind,
    check_not_quantized,
    check_settings,
    count_experts,
    load_config,
    make_published,
    reading_model,
)
from recipes.model.weights.files import (
    PublishedWeights,
    check_head,
    check_tied,
    copy_of,
    locate,
    log_unread,
    open_weights,
    read_config,
)
from recipes.model.weights.hf_any import load_weights, save_weights
from recipes.model.weights.hf_deepseek import DeepSeekV3Format
from recipes.model.weights.hf_format import FITTING_FOLDER, Entry, Format, HFConfig
from recipes.model.weights.hf_gpt2 import GPT2Format
from recipes.model.weights.hf_llama import LlamaFormat
from recipes.model.weights.hf_mixtral import MixtralFormat
from recipes.model.weights.llava_processor import LlavaProcessorFiles, write_pixels
from recipes.model.weights.text_side import EXPORT_FILES, end_texts, load_exported_tokenizer, writing_text_side
from recipes.tokenizer import TOKENIZER_FILE
from recipes.transform.published import Pixels

log = logging.getLogger("lightning_recipes")

_OF_TRANSFORMERS = (OfTransformers, TransformersImageText)
_TIED_HEAD = "lm_head.weight"  # a copy of the embedding where the two are tied
_BLOCK = re.compile(r"(?:^|\.)(?:h|layers)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_CHANNELS = 3  # of an image that a processor of transformers gives
_MOST_NAMES = 5  # tensor names of a kind listed in an error: a model with experts has thousands


def load_pretrained(model: nn.Module, name_or_folder: str | Path) -> None:
    """Fill every parameter and buffer of `model` from published weights.

    Args:
        model: Model on the device of the run, sharded or not: a GPT2, a Llama, or any of transformers.
        name_or_folder: Folder with config.json and weights, or a hub name.

    Raises:
        ValueError: config.json does not match the model (every difference is listed), or the weights are missing;
            nothing was loaded.
    """
    if isinstance(model, _OF_TRANSFORMERS):
        name, is_other = str(name_or_folder), str(name_or_folder) != model.name
        if is_other:
            check_settings(model.inner.config, locate(name), name=model.name, pretrained=name)
        load_weights(model.inner, name, key="model.pretrained" if is_other else "model.name")
        model.init_buffers()
        return
    folder = locate(str(name_or_folder))
    check_head(folder, f"model.pretrained={name_or_folder}")
    layout = _format(getattr(model, "whole", None) or model)  # under pipeline parallelism, `model` is one stage
    _check_config(layout, config=read_config(folder), folder=folder)
    setting = f"model.pretrained={folder}"
    with open_weights(folder) as weights:
        names = _check_names(layout, weights=weights, folder=folder)
        _language_model(model).init_buffers()  # before the weights: some formats also store buffers
        tensors: dict[str, Tensor] = {**dict(named_buffers(model)), **dict(named_parameters(model))}
        for entry in layout.entries():
            tensor = tensors.get(entry.name)
            if tensor is not None:  # else it belongs to another stage
                read = lambda name: weights.read(names[name])  # noqa: E731
                fill(tensor, entry.assemble(read, shape=tensor.shape, setting=setting))


def why_no_format(model: nn.Module) -> str | None:
    """Return why a model has no published form; None if transformers loads it."""
    if isinstance(model, _OF_TRANSFORMERS):
        return None
    try:
        _format(model).config()
    except ConfigError as mistake:
        return mistake.reason
    return None


def export_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer_folder: str | Path | None = None,
    published: str | None = None,
    pixels: Pixels | None = None,
) -> None:
    """Write a folder that `from_pretrained` of transformers can load.

    The files are read back before this returns: weights bit for bit, tokenizer, template and special ids by what they
    give. Vocabulary padding is not exported.

    Args:
        model: Unsharded model, as for `load_pretrained`.
        folder: Created if necessary; existing files with the same names are overwritten.
        tokenizer_folder: Source of the tokenizer; None: that of the published model, if there is one.
        published: Folder or hub name that the weights came from; None: that of the model, if it has one.
        pixels: What a model of images and text makes of an image, for its processor; None: it is not known, and there
            is none.

    Raises:
        ConfigError: transformers does not load the tokenizer as it was in training.
        OSError: A file cannot be written, or differs when read back.
    """
    published = published or (model.name if isinstance(model, _OF_TRANSFORMERS) else getattr(model, "pretrained", None))
    tokenizer = None if tokenizer_folder is None else load_exported_tokenizer(Path(tokenizer_folder), published)
    channels = getattr(model, "in_channels", _CHANNELS)
    if pixels is not None and channels != _CHANNELS:
        log.info(
            "No processor is exported: those of transformers make three channels, and the model reads %d", channels
        )
        pixels = None
    processor: LlavaProcessorFiles | None = None
    if isinstance(model, Llava) and tokenizer is not None and pixels is not None:
        processor = LlavaProcessorFiles(model, tokenizer, pixels)
        tokenizer = processor.tokenizer
    # an adapter or settings of an earlier export would be read with this one
    with filling(Path(folder), owned=EXPORT_FILES) as target:
        _write_config(model, target)
        with writing_text_side(target, tokenizer=tokenizer, published=published):
            if isinstance(model, _OF_TRANSFORMERS):
                save_weights(model.inner, target)
            else:
                _write_weights(model, target)
        if isinstance(model, TransformersImageText) and (target / TOKENIZER_FILE).is_file():
            end_texts(target, max_seq_len=model.max_seq_len)
        if isinstance(model, TransformersImageText) and pixels is not None:
            write_pixels(pixels, target)
        if processor is not None:
            processor.write(target)


def _write_config(model: nn.Module, target: Path) -> None:
    """Write the config without the dtype, which is added with the weights."""
    if isinstance(model, _OF_TRANSFORMERS):
        text = model.inner.config.to_json_string()
    else:
        text = json.dumps(_format(model).config())
    (target / "config.json").write_text(text, encoding="utf-8")


def _write_weights(model: nn.Module, target: Path) -> None:
    """Write and read back the weights and the config of a model of this project."""
    layout = _format(model)
    parameters: dict[str, Tensor] = {**dict(named_buffers(model)), **dict(named_parameters(model))}
    sharded = [name for name, value in parameters.items() if isinstance(value, DTensor)]
    assert not sharded, f"gather the model before it is exported: {len(sharded)} sharded parameters"
    settings = layout.config()  # first, so that an error leaves no files behind
    tensors: dict[str, Tensor] = {}
    for entry in layout.entries():
        tensors |= entry.publish(parameters[entry.name])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config = settings | {"torch_dtype": dtype}
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _verify(layout, parameters=parameters, folder=target)


def _format(model: nn.Module) -> Format:
    if isinstance(model, GPT2):
        return GPT2Format(model)
    if isinstance(model, DeepSeekV3):
        return DeepSeekV3Format(model)
    if isinstance(model, MoeLlama):
        return MixtralFormat(model)
    return LlamaFormat(_language_model(model))


def _language_model(model: nn.Module) -> Any:
    if not isinstance(model, GPT2 | Llama):
        raise ConfigError(
            f"model._target_={type(model).__module__}.{type(model).__name__}",
            "no published format is known for a model of this class",
            "mode.format=safetensors for an export; models of gpt2, llama, mixtral, deepseek and huggingface have one",
        )
    return model


def _check_config(layout: Format, *, config: HFConfig, folder: Path) -> None:
    setting, any_model = f"model.pretrained={folder}", f"model=huggingface {type_setting('model.name', folder)}"
    positions = [config.get(key) for key in ("max_position_embeddings", "n_positions")]
    longest = min([layout.model.max_seq_len, *(number for number in positions if isinstance(number, int))])
    any_model += f" model.max_seq_len={longest}, without the other settings of model"
    if (kind := config.get("model_type")) not in layout.kinds:  # all else would differ, too
        kinds = " or ".join(layout.kinds)
        fix = any_model if _find_fault(folder, setting) is None else f"model.pretrained=<weights of a {kinds}>"
        reason = f"it is of the type {kind}" if kind else "its config.json has no model_type"
        raise ConfigError(setting, f"{reason}, and this model is of the type {kinds}", fix)
    check_not_quantized(config.get("quantization_config"), setting)
    with reading(folder / "config.json", setting, "model.pretrained=<folder with a valid config.json>"):
        full = layout.with_defaults(config)
        found = [setting.difference(full) for setting in layout.settings(full)]
    differences = [difference for difference in found if difference is not None]
    if differences:
        fixes = [fix for _, fix in differences]
        # one that no setting of ours removes makes those that one would remove irrelevant
        whole = [fix or any_model for fix in fixes if fix is None or fix.startswith("model.pretrained")]
        if not any("=<" in fix for fix in whole) and (fault := _find_fault(folder, setting)) is not None:
            raise fault
        raise ConfigError(
            setting,
            f"it does not fit: {'; '.join(line for line, _ in differences)}",
            whole[0] if whole else " ".join(map(str, fixes)),
        )


def _find_fault(folder: Path, setting: str) -> ConfigError | None:
    """Return why config.json describes no model, or none of the tensors beside it, so that none of it is advised."""
    if find_spec("transformers") is None:
        return None  # optional
    try:
        config = load_config(str(folder))
        with reading_model(str(folder)):
            check_kind(config, name=str(folder))
            with torch.device("meta"):
                model = make_published(config, name=str(folder))
    except ConfigError as error:
        return ConfigError(setting, error.reason, "model.pretrained=<folder with a valid config.json>")
    described = model.state_dict()
    with open_weights(folder) as weights:
        names = weights.names()
        if not config.tie_word_embeddings and _TIED_HEAD in described.keys() - names:
            reason = f"config.json has tie_word_embeddings=false, and the file has no {_TIED_HEAD}"
            return ConfigError(setting, reason, FITTING_FOLDER)
        for copy, source in model.all_tied_weights_keys.items():
            if {copy, source} <= names:
                try:
                    check_tied(weights, copy, source, setting)
                except ConfigError as error:
                    return error
        for name in sorted(names & described.keys()):
            if weights.shape(name) != (expected := tuple(described[name].shape)):
                reason = f"its {name} has the shape {weights.shape(name)}, and its config.json describes {expected}"
                return ConfigError(setting, reason, FITTING_FOLDER)
    own, others = (_count(_BLOCK, found) for found in (described, names))
    further = getattr(config, "num_nextn_predict_layers", 0) or 0
    if own and others and not own <= others <= own + further:
        reason = f"its tensors are those of {others} blocks, and its config.json describes {own}"
        return ConfigError(setting, reason, FITTING_FOLDER)
    own, others = count_experts(config), _count(_EXPERT, names)
    if own and others and own != others:  # transformers has one tensor of all of them
        reason = f"its tensors are those of {others} experts, and its config.json describes {own}"
        return ConfigError(setting, reason, FITTING_FOLDER)
    return None


def _count(part: re.Pattern[str], names: Collection[str]) -> int:
    return max((int(match[1]) + 1 for name in names if (match := part.search(name))), default=0)


def _check_names(layout: Format, *, weights: PublishedWeights, folder: Path) -> dict[str, str]:
    """Map full names to names in the file, for exactly the tensors of `layout`."""
    full_names = {name: layout.full_name(name) for name in weights.names()}
    in_file = {full: name for name, full in full_names.items()}
    in_file.pop(None, None)
    wanted = {name for entry in layout.entries() for name in entry.published}
    missing = sorted(wanted - in_file.keys())
    unknown = [in_file[name] for name in sorted(in_file.keys() - wanted, key=str)]
    if missing or unknown:
        lines = [f"{what}: {_list(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ConfigError(
            f"model.pretrained={folder}",
            f"the tensors are not those its config.json describes: {'; '.join(lines)}",
            FITTING_FOLDER if unknown else copy_of("model.pretrained"),
        )
    unread = {name for name, full in full_names.items() if full is None}
    if _TIED_HEAD in unread:
        embedding = in_file[f"{layout.outside['embedding']}.weight"]
        check_tied(weights, _TIED_HEAD, embedding, f"model.pretrained={folder}")
    log_unread(unread - {_TIED_HEAD}, folder)
    return {str(full): name for full, name in in_file.items()}


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _verify(layout: Format, *, parameters: dict[str, Tensor], folder: Path) -> None:
    _check_config(layout, config=read_config(folder), folder=folder)
    entries: list[Entry] = layout.entries()
    with open_weights(folder) as weights:
        for entry in entries:
            parameter = parameters[entry.name].detach().cpu()
            num_rows = sum(entry.rows)
            read = entry.assemble(weights.read, shape=parameter[:num_rows].shape, setting=f"model.pretrained={folder}")
            if not torch.equal(read, parameter[:num_rows]):
                raise OSError(f"{folder}/model.safetensors: {entry.name} reads back differently")
