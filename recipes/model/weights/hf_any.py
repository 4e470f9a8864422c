"""Load and save weights of any `transformers` model, one tensor at a time if the names match."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.errors import ConfigError
from recipes.model.init import fill, named_parameters
from recipes.model.weights.files import locate, open_weights

log = logging.getLogger("lightning_recipes")


def load_weights(inner: Any, name_or_folder: str) -> None:
    """Fill every parameter, and every buffer present in the files, from published weights.

    If tensor names match those of the model, tensors are read one by one. Otherwise transformers loads and converts the
    files, which takes host memory for all weights in every process.

    Args:
        inner: `transformers` model on the device of the run, sharded or not.
        name_or_folder: Folder with config.json and weights, or a hub name.

    Raises:
        ConfigError: The weights are missing or belong to a different model.
    """
    folder = locate(name_or_folder)
    wanted = _tensors(inner)
    prefix = f"{inner.base_model_prefix}."
    with open_weights(folder) as weights:
        names = weights.names()
        found = {name: own for name in wanted for own in (name, name.removeprefix(prefix)) if own in names}
        if len(found) == len(wanted):
            _check_rest(inner, names - {*found.values()}, name_or_folder)
            for name, tensor in wanted.items():
                _set(tensor, weights.read(found[name]), found[name], name_or_folder)
            return
    missing = [name for name in wanted if name not in found]
    log.info(
        "%s names %d of %d tensors in another way (%s, …): transformers converts them, in host memory",
        *(name_or_folder, len(missing), len(wanted), missing[0]),
    )
    converted = _tensors(_load_converted(folder, name_or_folder))
    absent = sorted({*wanted} - {*converted})
    if absent:
        reason = f"it has no {absent[0]}" + (f" and {len(absent) - 1} other weights" if len(absent) > 1 else "")
        raise ConfigError(f"model.pretrained={name_or_folder}", reason, "model.pretrained=<the same model>")
    for name, tensor in wanted.items():
        _set(tensor, converted[name].detach(), name, name_or_folder)


def _tensors(inner: Any) -> dict[str, Tensor]:
    """Return the tensors that weight files contain: base parameters (tied ones once) and persistent buffers."""
    saved = inner.state_dict()
    buffers = {name: buffer for name, buffer in inner.named_buffers() if name in saved}
    return dict(named_parameters(inner)) | buffers


def _set(tensor: Tensor, values: Tensor, name: str, published: str) -> None:
    shape = getattr(tensor, "ds_shape", tensor.shape)
    if values.shape != shape:
        reason = f"its {name} has the shape {tuple(values.shape)}, not {tuple(shape)}"
        raise ConfigError(f"model.pretrained={published}", reason, "model.pretrained=<the same model>")
    fill(tensor, values)


def _check_rest(inner: Any, rest: set[str], published: str) -> None:
    """Reject leftover weights, which mean that the files are quantized or belong to a different model."""
    tied = {*(inner._tied_weights_keys or ())}
    ignored = [*(inner._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"attn\.(masked_)?bias$"]
    unknown = sorted(n for n in rest - tied if not any(re.search(pattern, n) for pattern in ignored))
    if unknown:
        more = f", and {len(unknown) - 1} more" if unknown[1:] else ""
        reason = f"it has {unknown[0]}, for which the model has no place{more}"
        raise ConfigError(f"model.pretrained={published}", reason, "model.pretrained=<the same model>")


def _load_converted(folder: Path, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    with _without_progress_bars():
        whole, report = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if wrong:  # transformers would initialize them randomly
        reason = f"its files do not have {wrong[0]}" + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else "")
        raise ConfigError(f"model.pretrained={name}", reason, "model.pretrained=<a complete copy>")
    return whole


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


def save_weights(inner: Any, folder: Path) -> None:
    """Write weights and config in the format of `transformers`, then load them and compare them with the model.

    Args:
        inner: Unsharded model.
        folder: Created if necessary.

    Raises:
        OSError: The files cannot be written, or differ when read back.
    """
    with _without_progress_bars():
        inner.save_pretrained(folder)
    loaded = _tensors(_load_converted(folder, str(folder)))
    for name, tensor in _tensors(inner).items():
        if name not in loaded or not torch.equal(loaded[name].float(), tensor.detach().cpu().float()):
            raise OSError(f"{folder}: {name} reads back differently")
