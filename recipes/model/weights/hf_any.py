"""Weights of any model of `transformers`: read tensor by tensor where the names agree, written in its own format."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.errors import ConfigError
from recipes.model.init import fill, named_parameters
from recipes.model.weights.files import locate, open_weights

log = logging.getLogger("lightning_recipes")


def load_weights(inner: nn.Module, name_or_folder: str) -> None:
    """Fill every parameter from published weights.

    A file whose tensors have the names of the parameters is read tensor by tensor. Others are read by transformers
    itself, which knows how to convert them, and needs host memory for all weights in every process.

    Args:
        inner: The model, on the device of the run, sharded or not.
        name_or_folder: Folder with config.json and weights, or a name of the hub.

    Raises:
        ConfigError: The weights are not found, or are not those of the model.
    """
    folder = locate(name_or_folder)
    parameters = dict(named_parameters(inner))
    prefix = f"{getattr(inner, 'base_model_prefix', '')}."
    with open_weights(folder) as weights:
        names = weights.names()
        found = {name: own for name in parameters for own in (name, name.removeprefix(prefix)) if own in names}
        if len(found) == len(parameters):
            for name, parameter in parameters.items():
                values = weights.read(found[name])
                if values.shape != _shape(parameter):
                    reason = f"its {found[name]} has the shape {tuple(values.shape)}, not {tuple(_shape(parameter))}"
                    raise ConfigError(f"model.pretrained={name_or_folder}", reason, "model.pretrained=<the same model>")
                fill(parameter, values)
            return
    missing = [name for name in parameters if name not in found]
    log.info(
        "%s names %d of %d tensors in another way (%s, …): transformers converts them, in host memory",
        *(name_or_folder, len(missing), len(parameters), missing[0]),
    )
    _load_converted(parameters, folder, name_or_folder)


def _load_converted(parameters: dict[str, nn.Parameter], folder: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    with _without_progress_bars():
        whole = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, trust_remote_code=False)
    values: dict[str, Any] = dict(whole.named_parameters())
    missing = sorted({*parameters} - {*values})
    if missing:
        reason = f"it has no {missing[0]}" + (f" and {len(missing) - 1} other weights" if len(missing) > 1 else "")
        raise ConfigError(f"model.pretrained={name}", reason, "model.pretrained=<the same model>")
    for key, parameter in parameters.items():
        fill(parameter, values[key].detach())


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as of_transformers

    was_enabled = of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            of_transformers.enable_progress_bar()


def _shape(parameter: nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def save_weights(inner: Any, folder: Path) -> None:
    """Write a folder that `transformers` loads, and compare what it holds with the model.

    Args:
        inner: The model, not sharded.
        folder: Created if necessary.

    Raises:
        OSError: The files cannot be written, or read back differently.
    """
    with _without_progress_bars():
        inner.save_pretrained(folder)
    with open_weights(folder) as weights:
        names = weights.names()
        for name, parameter in inner.named_parameters():
            if name not in names or not torch.equal(weights.read(name), parameter.detach().cpu()):
                raise OSError(f"{folder}: {name} reads back differently")
