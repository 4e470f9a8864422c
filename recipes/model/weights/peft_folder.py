"""Save and load adapters in the folder format of `peft`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from recipes.adapter import is_adapter
from recipes.errors import ConfigError
from recipes.files import filling
from recipes.model.init import fill, unsharded_shape

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# settings that change what an adapter computes: name in peft -> our name
_OF_LORA = {"r": "r", "lora_alpha": "alpha", "use_rslora": "scales_by_root", "use_dora": "dora"}


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
        ConfigError: Not a peft folder, or its adapter has another type, rank or target modules.
    """
    folder, typed = Path(pretrained).expanduser(), f"adapter.pretrained={pretrained}"
    fix = f"adapter.pretrained=<folder with {CONFIG} and {WEIGHTS}>, or null"
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(typed, f"there is no {name} in it", fix)
    try:
        _check_config(json.loads((folder / CONFIG).read_text(encoding="utf-8")), model.adapter_config, typed)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            _fill(model, file, typed)
    except (ValueError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(typed, f"its files are damaged: {error}", fix) from error


def _check_config(found: dict[str, Any], own: Any, typed: str) -> None:
    kind = own.peft_type.value
    if found.get("peft_type") != kind:
        raise ConfigError(
            f"{typed} adapter={kind.lower()}", f"it is of the kind {found.get('peft_type')}", "another one"
        )
    for theirs, ours in _OF_LORA.items():
        if hasattr(own, theirs) and found.get(theirs) != getattr(own, theirs):
            value = json.dumps(found.get(theirs))
            raise ConfigError(typed, f"it was trained with adapter.{ours}={value}", f"adapter.{ours}={value}")


def _fill(model: nn.Module, file: Any, typed: str) -> None:
    parameters = {name_in_peft(name): value for name, value in model.named_parameters() if is_adapter(name)}
    names = set(file.keys())
    if names != set(parameters):
        other = sorted(names ^ set(parameters))[0]
        reason = f"it has {len(names)} tensors and the model {len(parameters)}; {other} is in one of them alone"
        raise ConfigError(typed, reason, "adapter.target_modules=<those of its adapter_config.json>, or its own model")
    for name, parameter in parameters.items():
        values = file.get_tensor(name)
        shape = unsharded_shape(parameter)
        if values.numel() != shape.numel():
            reason = f"{name} has the shape {tuple(values.shape)}, and that of the model {tuple(shape)}"
            raise ConfigError(typed, reason, "the model it was trained with")
        fill(parameter, values.view(shape))
