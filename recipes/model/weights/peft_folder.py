"""Save and load adapters in the folder format of `peft`."""

import copy
import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from recipes.adapter import is_adapter, is_factor, list_targets, list_trained_beside
from recipes.errors import ConfigError, type_setting
from recipes.files import filling
from recipes.foreign_file import reading
from recipes.model.init import fill, unsharded_shape
from recipes.model.score import SCORE_WEIGHT, has_score
from recipes.model.weights.files import copy_of, open_file, read_settings

log = logging.getLogger("lightning_recipes")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
OLD_WEIGHTS = "adapter_model.bin"  # of peft before 0.7
# settings that change what an adapter computes, and that an option of conf/adapter has, too
_OF_LORA = ("r", "lora_alpha", "use_rslora", "use_dora")
# the only settings that may differ: every other one, of this version of peft (0.21) or a later one, is compared
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "peft_type", "peft_version", "revision", "task_type"),
    *("inference_mode", "lora_dropout", "runtime_config", "merge_weights"),
    # which layers have an adapter is seen from its tensors, and of which form their weights are, from the layers
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "feedforward_modules"),
    *("fan_in_fan_out", "megatron_config", "megatron_core", "ensure_weight_tying"),
    # compared by the modules that they are
    "modules_to_save",
    # used by another setting, which is compared
    *("qalora_group_size", "corda_config", "eva_config", "loftq_config", "lora_ga_config", "init_ia3_weights"),
}
# initial values that leave the frozen weights as they are; all others (PiSSA, OLoRA, LoftQ …) take a part out of them
_INIT = "init_lora_weights"
_HARMLESS_INIT = ("gaussian", "eva", "orthogonal", "mica")
_OPTIONS = ("LORA", "IA3")  # of conf/adapter, as peft names them
_MAX_SHOWN = 100  # characters of a setting: a pattern may list every layer
_NEW = "adapter.pretrained=null, which begins a new adapter: peft does not merge this one"
_SAVED = "adapter.pretrained=<folder that save_pretrained(<folder>) of peft writes>"
# in the state dict of a model of peft, names are followed by that of the adapter
_OF_STATE_DICT = re.compile(
    r"(?P<layer>.+)\.(?P<kind>lora_A|lora_B|lora_magnitude_vector|ia3_l)\.(?P<adapter>(?!weight$)\w+)(\.weight)?"
)
_NOT_MERGED = ("alora_invocation_tokens", "arrow_config", "layer_replication")  # not by peft, or not to a file
_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT")
_MERGED = (
    "adapter.pretrained=null model.name=<the model that peft's merge_and_unload() made of the adapter and its own>"
)


def name_in_peft(name: str) -> str:
    """Return the name of an adapter parameter in a peft folder."""
    # peft omits the adapter name, and `.weight` after a magnitude vector
    plain = name.removeprefix("inner.").replace(".default", "")
    return f"base_model.model.{plain.replace('lora_magnitude_vector.weight', 'lora_magnitude_vector')}"


def list_saved(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are in a peft folder: of an adapter, and what is trained beside it."""
    of_adapter = {name for name, _ in model.named_parameters() if is_adapter(name) or name == SCORE_WEIGHT}
    return of_adapter | list_trained_beside(model)


def save_adapter(model: Any, folder: Path) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` can load on top of the published model.

    That of a reward model is for its sequence classifier in transformers, and has the score, too.

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
    if not getattr(model, "is_whole", True):
        reason = "the model beside the adapter was put together of several, and is published nowhere as a whole"
        raise ConfigError("mode.adapter=separate", reason, "mode.adapter=merged")
    saved = list_saved(model)
    tensors = {
        name_in_peft(name): parameter.detach().cpu().clone(memory_format=torch.contiguous_format)  # some may be tied
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in saved
    }
    config = copy.copy(model.adapter_config)
    config.base_model_name_or_path = model.pretrained
    config.target_modules = {name.removeprefix("inner.") for name in config.target_modules}
    if getattr(config, "feedforward_modules", None):
        config.feedforward_modules = {name.removeprefix("inner.") for name in config.feedforward_modules}
    config.task_type = "SEQ_CLS" if has_score(model) else "CAUSAL_LM"
    beside = [name.removeprefix("inner.") for name in config.modules_to_save or []]
    config.modules_to_save = [*beside, *(["score"] if has_score(model) else [])] or None
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
    weights = _find_weights(folder, pretrained)
    found = read_settings(folder / CONFIG, typed)
    wanted = _check_config(found, model, typed)
    base, own = found.get("base_model_name_or_path"), getattr(model, "pretrained", None)
    with open_file(weights, typed) as file:
        is_known = base is not None and base != own  # else the model is already that of the adapter, or is not named
        names = _plain_names(file.names(), typed)
        advised = type_setting("model.name", base) if is_known else None
        beside, more = _find_beside({*names}, found, model, typed)
        of_adapter = {*names} - beside
        _check_complete(of_adapter, found, model, typed, base=advised)
        read = {name: file.read(in_file) for name, in_file in names.items()}
    _fill(model, {name: read[name] for name in of_adapter}, typed, wanted + more, base=advised)
    _fill_beside(model, {name: read[name] for name in beside}, typed, base=advised)
    taken_on = own or "weights drawn from the seed"
    if base is None:
        log.info("%s does not say which model it was trained beside, and goes on beside %s", pretrained, taken_on)
    elif base != own:
        log.info("%s was trained beside %s, and goes on beside %s", pretrained, base, taken_on)


def _find_weights(folder: Path, pretrained: str) -> Path:
    """Return the file of tensors in a peft folder, whose config is there, too.

    Raises:
        ConfigError: It is no such folder.
    """
    typed, fix = f"adapter.pretrained={pretrained}", f"adapter.pretrained=<folder with {CONFIG} and {WEIGHTS}>, or null"
    if os.path.isfile(folder):
        is_inside = os.path.isfile(folder.parent / CONFIG)
        fix = type_setting("adapter.pretrained", os.path.dirname(pretrained) or ".") if is_inside else fix
        raise ConfigError(typed, "it is a file, not a folder", fix)
    if not os.path.isdir(folder):
        reason = "there is no such folder, and adapters are read from folders alone"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", pretrained):
            fix = f"hf download {pretrained} --local-dir <folder>, then adapter.pretrained=<folder>"
        raise ConfigError(typed, reason, fix)
    weights = next((path for name in (WEIGHTS, OLD_WEIGHTS) if os.path.isfile(path := folder / name)), None)
    if os.path.isfile(folder / CONFIG) and weights is not None:
        return weights
    if os.path.isdir(folder / "checkpoints"):
        reason = "the folder is that of a run, whose checkpoints are in another format"
        export = f"mode=export mode.adapter=separate {type_setting('resume', pretrained)}"
        exported = type_setting("adapter.pretrained", f"{pretrained}/export")
        raise ConfigError(typed, reason, f"{export}, then {exported}")
    if os.path.isfile(folder / "config.json") and weights is None:
        fix = f"adapter.pretrained=null {type_setting('model.name', pretrained)}"
        raise ConfigError(typed, "it holds a whole model, not an adapter", fix)
    missing = WEIGHTS if os.path.isfile(folder / CONFIG) else CONFIG
    raise ConfigError(typed, f"there is no {missing} in it", fix)


def _plain_names(in_file: Collection[str], typed: str) -> dict[str, str]:
    """Map the names that peft saves to those in a file, which may hold the state dict of a model of peft as it is.

    There, each name has that of the adapter: `lora_A.default.weight`.

    Raises:
        ConfigError: It holds several adapters.
    """
    plain: dict[str, str] = {}
    adapters: set[str] = set()
    for name in in_file:
        if (match := _OF_STATE_DICT.fullmatch(name)) is None:
            plain[name] = name
            continue
        adapters.add(match["adapter"])
        end = "" if match["kind"].endswith(("magnitude_vector", "ia3_l")) else ".weight"
        plain[f"{match['layer']}.{match['kind']}{end}"] = name
    if len(plain) < len(in_file):
        reason = f"its file holds the tensors of several adapters ({', '.join(sorted(adapters))})"
        raise ConfigError(typed, reason, _SAVED)
    return plain


def _check_complete(names: set[str], found: dict[str, Any], model: nn.Module, typed: str, *, base: str | None) -> None:
    """Check that a folder has tensors for the layers that its config names, and for no others; `base` as for `_fill`.

    Raises:
        ConfigError: It lacks some, or peft would not read some; else half of an adapter would be taken for a whole one.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    targets = found.get("target_modules")
    if not targets or targets == "all-linear" or any(_layer_of(name) == name for name in names):
        return  # peft replaces what stands for layers by their names, before it saves an adapter
    keys = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    own = SimpleNamespace(**{key: found.get(key) for key in keys})
    with reading(Path(typed.partition("=")[2]) / CONFIG, typed, f"adapter.pretrained=<folder with a valid {CONFIG}>"):
        wanted = {layer for layer in _list_known(model) if check_target_module_exists(own, layer)}
    layers = {_layer_of(name) for name in names}
    if missing := sorted(wanted - layers):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        reason = f"its {CONFIG} names the layer {missing[0]}{more}, of which its file has no tensors"
        raise ConfigError(typed, reason, copy_of(typed) if base is None else f"{copy_of(typed)}, or {base}")
    if further := sorted((layers & _list_known(model)) - wanted):
        reason = f"its file has tensors of {further[0]}, which its {CONFIG} does not name, so that peft leaves them out"
        raise ConfigError(typed, reason, _SAVED)


def _check_config(found: dict[str, Any], model: Any, typed: str) -> list[str]:
    """Check that a folder has no setting with which its tensors stand for another function than with ours.

    Returns:
        The overrides with which the settings of the model become those of the folder.
    """
    own = model.adapter_config
    kind, theirs = own.peft_type.value, found.get("peft_type")
    if theirs != kind:
        fix = f"adapter={theirs.lower()}" if theirs in _OPTIONS else _NEW if theirs in _PROMPTS else _MERGED
        reason = f"it is of the kind {theirs}" if theirs else f"its {CONFIG} has no peft_type"
        raise ConfigError(f"{typed} adapter={kind.lower()}", reason, fix)
    wanted: list[str] = []
    # older versions of peft lack settings: they had today's default; newer ones may have settings not known here
    ours, defaults = own.to_dict(), type(own)().to_dict()
    for key, expected in (dict.fromkeys(found) | ours).items():
        value = found.get(key, defaults.get(key))
        if key in _HARMLESS or (key not in _OF_LORA and not (value or expected)):
            continue
        if key == _INIT and (isinstance(value, bool) or value in _HARMLESS_INIT):
            continue
        shown = json.dumps(value)[:_MAX_SHOWN]
        is_rank = key == "r" and not isinstance(value, int)
        if key in _OF_LORA and (is_rank or not _is_possible(value, like=expected)):
            fix = f"adapter.pretrained=<folder with a valid {CONFIG}>"
            raise ConfigError(typed, f"its {CONFIG} has {key}={shown}, which no adapter can have", fix)
        if value == expected:
            continue
        if key in _OF_LORA:
            wanted.append(f"adapter.{key}={shown}")
            continue
        has_biases = any(getattr(module, "bias", None) is not None for module in _get_adapted(model))
        fix = _NEW if key in _NOT_MERGED or (key == "lora_bias" and not has_biases) else _MERGED
        raise ConfigError(typed, f"its {CONFIG} has {key}={shown}, which no adapter here has", fix)
    return wanted


def _find_beside(names: set[str], found: dict[str, Any], model: Any, typed: str) -> tuple[set[str], list[str]]:
    """Find the tensors of modules that were trained in full beside an adapter.

    Returns:
        Their names, and the override that the model lacks if it does not train all of these modules.

    Raises:
        ConfigError: The model has no such module, or some tensors of one are missing.
    """
    ends = found.get("modules_to_save") or []
    parameters = {name_in_peft(name) for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name_in_peft(SCORE_WEIGHT)
    }
    beside: set[str] = set()
    modules: list[str] = []
    for end in ends if isinstance(ends, list) else [ends]:
        own = [name for name in _list_plain_modules(model) if isinstance(end, str) and name.endswith(end)]
        # of modules within each other peft saves the outer one
        own = [name for name in own if any(each.startswith(f"base_model.model.{name}.") for each in parameters & names)]
        if not own:
            shown = json.dumps(found["modules_to_save"])[:_MAX_SHOWN]
            raise ConfigError(typed, f"its {CONFIG} has modules_to_save={shown}, which no adapter here has", _MERGED)
        modules += own
        beside |= {each for each in parameters for name in own if each.startswith(f"base_model.model.{name}.")}
    if missing := sorted(beside - names):
        raise ConfigError(typed, f"it does not have {missing[0]}", copy_of(typed))
    trained = {name_in_peft(name) for name in list_trained_beside(model)}
    return beside, [] if beside <= trained else [f"adapter.modules_to_save=[{','.join(sorted({*modules}))}]"]


def _list_plain_modules(model: nn.Module) -> list[str]:
    return [name.removeprefix("inner.") for name, _ in model.named_modules() if ".base_layer" not in name]


def _fill_beside(model: nn.Module, read: dict[str, Tensor], typed: str, *, base: str | None) -> None:
    """Fill the modules that are trained in full; `base` as for `_fill`.

    Raises:
        ConfigError: They have other shapes, or two of them have different weights where the model has one.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name_in_peft(name))
    filled = {parameter: own for parameter, own in names.items() if not read.keys().isdisjoint(own)}
    for parameter, own in filled.items():
        name = next(each for each in own if each in read)
        theirs, shape = read[name].shape, unsharded_shape(parameter)
        if theirs != shape:
            reason = f"{name} has the shape {tuple(theirs)}, and that of the model {tuple(shape)}"
            raise ConfigError(typed, reason, copy_of(typed) if base is None else base)
        if not all(each in read and torch.equal(read[each], read[name]) for each in own):
            reason = f"{' and '.join(own)} are one weight of the model, and were trained apart"
            raise ConfigError(typed, reason, _NEW)
    for parameter, own in filled.items():
        fill(parameter, next(read[name] for name in own if name in read))


def _get_adapted(model: nn.Module) -> list[nn.Module]:
    modules: Iterator[Any] = model.modules()
    return [module.base_layer for module in modules if hasattr(module, "base_layer")]


def _is_possible(value: object, *, like: object) -> bool:
    """Return whether a setting of ours takes a value."""
    if isinstance(like, bool) or isinstance(value, bool):
        return isinstance(like, bool) and isinstance(value, bool)
    return isinstance(value, int | float) and 0 < value < math.inf


def _fill(model: nn.Module, read: dict[str, Tensor], typed: str, wanted: list[str], *, base: str | None) -> None:
    """Fill an adapter.

    Args:
        model: Model with an adapter.
        read: Its tensors, by the names that peft saves.
        typed: The override that named it.
        wanted: Overrides that its settings ask for.
        base: Override with the model that it was trained beside; None if that is not known to be another one.

    Raises:
        ConfigError: It has other layers, shapes or settings, of which all are in one message.
    """
    parameters = {name_in_peft(name): value for name, value in model.named_parameters() if is_adapter(name)}
    names = {*read}
    is_same = {*map(_layer_of, names)} == {*map(_layer_of, parameters)}
    if names != {*parameters} and not (is_same and wanted):  # the tensors of DoRA, of which its setting speaks
        layers = _advise_targets(model, names, {*parameters}, base, typed, _describe_names(names, {*parameters}))
        wanted = [*wanted, f"adapter.target_modules={_list(layers, among=_list_known(model))}"]
    inputs, own = (_scaling_inputs(tensors) for tensors in (read, parameters))
    if inputs != own and any(map(is_factor, names)):
        wanted.append(f"adapter.feedforward_modules={_list(inputs, among={*map(_layer_of, read)})}")
    if wanted:
        raise ConfigError(typed, f"it was trained with {' '.join(wanted)}", " ".join(wanted))
    for name, parameter in parameters.items():
        theirs, shape = read[name].shape, unsharded_shape(parameter)
        if theirs != shape:
            reason = f"{name} has the shape {tuple(theirs)}, and that of the model {tuple(shape)}"
            # the rank is that of its config, or would have been refused; so any other size is of another model
            is_rank = theirs[1:] == shape[1:] if ".lora_A." in name else theirs[:1] == shape[:1]
            fix = f"adapter.pretrained=<folder whose tensors are those of its {CONFIG}>"
            raise ConfigError(typed, reason, fix if is_rank or base is None else base)
    for name, parameter in parameters.items():
        fill(parameter, read[name])


def _describe_names(names: set[str], own: set[str]) -> str:
    if names - own:
        return f"it has {min(names - own)}, for which the model has no place"
    return f"it does not have {min(own - names)}"


def _scaling_inputs(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the layers with factors of their inputs, [1, inputs]; those of outputs are [outputs, 1]."""
    return {_layer_of(name) for name, values in tensors.items() if is_factor(name) and unsharded_shape(values)[0] == 1}


def _layer_of(name: str) -> str:
    """Return the layer that a tensor of a peft folder belongs to; the name itself if it is none of an adapter's."""
    match = re.fullmatch(r"base_model\.model\.(.+?)\.(lora_A|lora_B|lora_magnitude_vector|ia3_l)(\.\w+)*", name)
    return name if match is None else match[1]


def _advise_targets(
    model: nn.Module, names: set[str], own: set[str], base: str | None, typed: str, reason: str
) -> set[str]:
    """Return the layers of an adapter of other ones, which a model of its kind has.

    Raises:
        ConfigError: They are not linear layers of the blocks, or some of their tensors are missing.
    """
    wanted = {_layer_of(name) for name in names}
    if wanted == {_layer_of(name) for name in own}:
        raise ConfigError(typed, reason, copy_of(typed))
    if wanted <= _list_known(model):
        return wanted
    if foreign := {name for name in names if _layer_of(name) == name}:
        known = {f"base_model.model.{name.removeprefix('inner.')}" for name, _ in model.named_modules()}
        is_state = any(".base_layer." in name or name.rpartition(".")[0] not in known for name in foreign)
        # peft, too, fills whole layers, such as an embedding with further tokens
        raise ConfigError(
            typed, f"it has {min(foreign)}, which is no tensor of an adapter", _SAVED if is_state else _MERGED
        )
    if base is not None:
        raise ConfigError(typed, reason, f"{base}, or {_MERGED}")
    modules = {name.removeprefix("inner.").replace(".base_layer", "") for name, _ in model.named_modules()}
    # layers that the model has, and that are not adapted here; or those of another model
    raise ConfigError(typed, reason, _MERGED if wanted <= modules else copy_of(typed))


def _list_known(model: nn.Module) -> set[str]:
    return {name.removeprefix("inner.") for name in list_targets(model)}


def _list(layers: set[str], *, among: set[str]) -> str:
    """Return layers as a setting takes them: by the ends of their names, where these mean no others."""
    ends = {layer.rpartition(".")[2] for layer in layers}
    if {layer for layer in among if layer.rpartition(".")[2] in ends} == layers:
        layers = ends
    return f"[{','.join(sorted(layers))}]"
