"""Load and save weights of any `transformers` model, reading one tensor at a time where names match."""

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
    """Fill every parameter, and every buffer that files hold, from published weights.

    A file whose tensors have the names of the model is read tensor by tensor. Others are read by transformers itself,
    which knows how to convert them, and needs host memory for all weights in every process.

    Args:
        inner: The model, on the device of the run, sharded or not.
        name_or_folder: Folder with config.json and weights, or a name of the hub.

    Raises:
        ConfigError: The weights are not found, or are not those of the model.
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
    """Return what files hold by name: parameters without those of an adapter, once, and persistent buffers."""
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
    """Reject leftover weights: they are of a different model or quantized."""
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
    if wrong:  # transformers would draw them at random
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


def save_weights(inner: Any, folder: Path, *, published: str, end_of_text: int | None) -> None:
    """Write a folder that `transformers` loads, and compare what it loads with the model.

    Args:
        inner: The model, not sharded.
        folder: Created if necessary.
        published: Folder or hub name that the model came from, for its settings of generation.
        end_of_text: Token that ends an answer now; None: as before.

    Raises:
        OSError: The files cannot be written, or read back differently.
    """
    from transformers import GenerationConfig

    source = Path(published).expanduser()
    try:
        inner.generation_config = GenerationConfig.from_pretrained(str(source) if source.is_dir() else published)
    except OSError:  # a model need not have any
        log.info("%s has no settings of generation to copy", published)
    known = inner.generation_config.eos_token_id
    if end_of_text is not None and end_of_text not in (known if isinstance(known, list) else [known]):
        inner.generation_config.eos_token_id = inner.config.eos_token_id = end_of_text
    with _without_progress_bars():
        inner.save_pretrained(folder)
    loaded = _tensors(_load_converted(folder, str(folder)))
    for name, tensor in _tensors(inner).items():
        if name not in loaded or not torch.equal(loaded[name].float(), tensor.detach().cpu().float()):
            raise OSError(f"{folder}: {name} reads back differently")
