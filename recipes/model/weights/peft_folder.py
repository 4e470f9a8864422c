"""Save and load adapters in the folder format of `peft`."""

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.adapter import is_adapter, is_factor, list_targets
from recipes.errors import ConfigError
from recipes.files import filling
from recipes.model.init import fill, unsharded_shape
from recipes.model.weights.files import WeightFile, copy_of, open_file, read_settings

log = logging.getLogger("lightning_recipes")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
OLD_WEIGHTS = "adapter_model.bin"  # of peft before 0.7
# settings that change what an adapter computes: name in peft -> our name
_OF_LORA = {"r": "r", "lora_alpha": "alpha", "use_rslora": "scales_by_root", "use_dora": "dora"}
# the only settings that may differ: every other one, of this version of peft (0.21) or a later one, is compared
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "peft_type", "peft_version", "revision", "task_type"),
    *("inference_mode", "lora_dropout", "runtime_config", "merge_weights"),
    # which layers have an adapter is seen from its tensors, and of which form their weights are, from the layers
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "feedforward_modules"),
    *("fan_in_fan_out", "megatron_config", "megatron_core", "ensure_weight_tying"),
    # used by another setting, which is compared
    *("qalora_group_size", "corda_config", "eva_config", "loftq_config", "lora_ga_config", "init_ia3_weights"),
}
# initial values that leave the frozen weights as they are; all others (PiSSA, OLoRA, LoftQ …) take a part out of them
_INIT = "init_lora_weights"
_HARMLESS_INIT = ("gaussian", "eva", "orthogonal", "mica")
_OPTIONS = ("LORA", "IA3")  # of conf/adapter, as peft names them
_MAX_SHOWN = 100  # characters of a setting: a pattern may list every layer
_NEW = "adapter.pretrained=null"
_NOT_MERGED = (
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "lora_bias",
)  # not by peft, or not to a file
_MERGED = (
    "adapter.pretrained=null model.name=<the model that peft's merge_and_unload() made of the adapter and its own>"
)


def name_in_peft(name: str) -> str:
    """Return the name of an adapter parameter in a peft folder."""
    # peft omits the adapter name, and `.weight` after a magnitude vector
    plain = name.removeprefix("inner.").replace(".default", "")
    return f"base_model.model.{plain.replace('lora_magnitude_vector.weight', 'lora_magnitude_vector')}"


def save_adapter(model: Any, folder: Path) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` can load on top of the published model.

    Args:
        model: Unsharded HuggingFace model with an adapter.
        folder: Created if necessary.

    Raises:
        ConfigError: The layer names of the model differ from the published ones.
        OSError: A tensor cannot be written, or differs when read back.
    """
    from safetensors.torch import load_file, save_file

    if not hasattr(model, "inner"):
        reason = f"{type(model).__name__} has other layers than the published model, so its adapter fits nothing else"
        raise ConfigError("mode.adapter=separate", reason, "mode.adapter=merged, or a run of model=huggingface")
    if model.pretrained is None:
        reason = "the weights beside the adapter were drawn from the seed, and are published nowhere"
        raise ConfigError("mode.adapter=separate", reason, "mode.adapter=merged")
    tensors = {
        name_in_peft(name): parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }
    config = model.adapter_config
    config.base_model_name_or_path = model.pretrained
    config.target_modules = {name.removeprefix("inner.") for name in config.target_modules}
    if getattr(config, "feedforward_modules", None):
        config.feedforward_modules = {name.removeprefix("inner.") for name in config.feedforward_modules}
    config.task_type = "CAUSAL_LM"
    with filling(folder) as unfinished:
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        read = load_file(unfinished / WEIGHTS)
        if wrong := [name for name, tensor in tensors.items() if not torch.equal(read[name], tensor)]:
            raise OSError(f"{folder / WEIGHTS}: {wrong[0]} reads back differently")
        config.save_pretrained(str(unfinished))


def load_adapter(model: nn.Module, pretrained: str) -> None:
    """Load adapter weights from a peft folder in place.

    Args:
        model: Model with an adapter, sharded or not.
        pretrained: The peft folder.

    Raises:
        ConfigError: Not a peft folder, or its adapter computes something else than that of the model.
    """
    folder, typed = Path(os.path.expanduser(pretrained)), f"adapter.pretrained={pretrained}"
    weights = next((path for name in (WEIGHTS, OLD_WEIGHTS) if os.path.isfile(path := folder / name)), None)
    for name, is_there in ((CONFIG, os.path.isfile(folder / CONFIG)), (WEIGHTS, weights is not None)):
        if not is_there:
            fix = f"adapter.pretrained=<folder with {CONFIG} and {WEIGHTS}>, or null"
            raise ConfigError(typed, f"there is no {name} in it", fix)
    assert weights is not None
    found = read_settings(folder / CONFIG, typed)
    _check_config(found, model.adapter_config, typed)
    base, own = found.get("base_model_name_or_path"), getattr(model, "pretrained", None)
    with open_file(weights, typed) as file:
        _fill(model, file, typed, base=f"model.name={base or '<the model it was trained with>'}")
    if base != own:
        log.info("%s was trained beside %s, and goes on beside %s", pretrained, base, own or "weights of the seed")


def _check_config(found: dict[str, Any], own: Any, typed: str) -> None:
    """Check that a folder has no setting with which its tensors stand for another function than with ours."""
    kind, theirs = own.peft_type.value, str(found.get("peft_type"))
    if theirs != kind:
        fix = f"adapter={theirs.lower()}" if theirs in _OPTIONS else _NEW
        raise ConfigError(f"{typed} adapter={kind.lower()}", f"it is of the kind {theirs}", fix)
    # older versions of peft lack settings: they had today's default; newer ones may have settings not known here
    ours, defaults = own.to_dict(), type(own)().to_dict()
    for key, expected in (dict.fromkeys(found) | ours).items():
        value = found.get(key, defaults.get(key))
        if key in _HARMLESS or value == expected or not (value or expected):
            continue
        if key == _INIT and (isinstance(value, bool) or value in _HARMLESS_INIT):
            continue
        shown = json.dumps(value)[:_MAX_SHOWN]
        if key in _OF_LORA and _is_possible(value, like=expected):
            name = _OF_LORA[key]
            raise ConfigError(typed, f"it was trained with adapter.{name}={shown}", f"adapter.{name}={shown}")
        fix = _NEW if key in _NOT_MERGED else _MERGED
        raise ConfigError(typed, f"its {CONFIG} has {key}={shown}, and this adapter does without", fix)


def _is_possible(value: object, *, like: object) -> bool:
    """Return whether a setting of ours takes a value."""
    if isinstance(like, bool) or isinstance(value, bool):
        return isinstance(like, bool) and isinstance(value, bool)
    return isinstance(value, int if isinstance(like, int) else int | float) and 0 < value < math.inf


def _fill(model: nn.Module, file: WeightFile, typed: str, *, base: str) -> None:
    parameters = {name_in_peft(name): value for name, value in model.named_parameters() if is_adapter(name)}
    names = {*file.names()}
    if names != {*parameters}:
        reason = f"it has {len(names)} tensors and the model {len(parameters)}"
        reason += f"; {min(names ^ {*parameters})} is in one of them alone"
        raise ConfigError(typed, reason, _advise_targets(model, names, {*parameters}, base, typed))
    read = {name: file.read(name) for name in parameters}
    for name, parameter in parameters.items():
        shape = unsharded_shape(parameter)
        if read[name].shape != shape:
            reason = f"{name} has the shape {tuple(read[name].shape)}, and that of the model {tuple(shape)}"
            fix = base
            theirs, own = (_scaling_inputs(tensors) for tensors in (read, parameters))
            if theirs != own:
                fix = f"adapter.input_modules={_list(theirs, among={*map(_layer_of, read)})}"
            raise ConfigError(typed, reason, fix)
    for name, parameter in parameters.items():
        fill(parameter, read[name])


def _scaling_inputs(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the layers with factors of their inputs, [1, inputs]; those of outputs are [outputs, 1]."""
    return {_layer_of(name) for name, values in tensors.items() if is_factor(name) and unsharded_shape(values)[0] == 1}


def _layer_of(name: str) -> str:
    """Return the layer that a tensor of a peft folder belongs to; the name itself if it is none of an adapter's."""
    match = re.fullmatch(r"base_model\.model\.(.+?)\.(lora_A|lora_B|lora_magnitude_vector|ia3_l)(\.\w+)*", name)
    return name if match is None else match[1]


def _advise_targets(model: nn.Module, names: set[str], own: set[str], base: str, typed: str) -> str:
    """Return what to type for an adapter of other layers: them, if they are linear layers of the blocks."""
    wanted = {_layer_of(name) for name in names}
    if wanted == {_layer_of(name) for name in own}:
        return copy_of(typed)
    known = {name.removeprefix("inner.") for name in list_targets(model)}
    if wanted <= known:
        return f"adapter.target_modules={_list(wanted, among=known)}"
    if not hasattr(model, "inner"):
        return f"model=huggingface {base}, whose layers it was trained on"
    return f"{base}, or {_MERGED}"


def _list(layers: set[str], *, among: set[str]) -> str:
    """Return layers as a setting takes them: by the ends of their names, where these mean no others."""
    ends = {layer.rpartition(".")[2] for layer in layers}
    if {layer for layer in among if layer.rpartition(".")[2] in ends} == layers:
        layers = ends
    return f"[{','.join(sorted(layers))}]"
