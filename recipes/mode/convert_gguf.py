"""Convert a GGUF file (llama.cpp) to a folder that `model=huggingface` can train."""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError, type_extra, type_setting
from recipes.files import filling, write_atomically
from recipes.foreign_file import reading, recognize
from recipes.model.rope import LLAMA3_ROPE, frequencies
from recipes.model.transformers_models import without_remarks
from recipes.model.weights.files import are_finite, log_unread
from recipes.model.weights.hf_any import CHECKED_AFTERWARDS, check_loaded, without_progress_bars
from recipes.model.weights.text_side import write_text_side
from recipes.numerics.deepspeed_import import without_warning_of_deepspeed
from recipes.numerics.torchao_import import without_warnings_of_torchao
from recipes.run_folder import claim_output
from recipes.runtime.console import LOGGER
from recipes.tokenizer import read_folder

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # those that gguf reads
_TOKENS = "tokenizer.ggml.tokens"
_ORDERS = ("tokenizer.ggml.merges", "tokenizer.ggml.scores")
_ANOTHER = "mode.path=<another file>, or the published folder itself: model=huggingface model.name=<folder or hub id>"
_EMBEDDING, _HEAD, _ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
_ROPE_THETA = 10_000.0  # in a file that does not say
_NUM_SHOWN = 3  # names of tensors in an error
_BLOCK = re.compile(r"blk\.(\d+)\.")
# settings that a converter always writes, of which transformers guesses those that are missing
_NEEDED = ("context_length", "embedding_length", "block_count", "attention.head_count")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # one of them
# settings that change the result and that transformers reads for few architectures: name in the file -> in its config
_SETTINGS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
}


def convert_gguf(
    resolved: ResolvedRun, *, path: str, output: str, dtype: Literal["float32", "bfloat16", "float16"]
) -> int:
    """Write the weights, config and tokenizer of a GGUF file in `transformers` format.

    Quantized weights are dequantized, which does not restore the original weights.

    Args:
        resolved: Unused; the file describes its model.
        path: GGUF file.
        output: Folder to write.
        dtype: Dtype of the weights; float32 represents the dequantized values exactly.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: It is not a GGUF file, transformers cannot read its model from GGUF, or nothing can be written.
    """
    del resolved
    file, folder = (Path(os.path.expanduser(name)).absolute() for name in (path, output))
    _check(file, folder)
    claim_output(folder, "mode.output", is_new_folder=True)
    model, tokenizer = _load(file, getattr(torch, dtype))
    with filling(folder) as unfinished:
        with without_warning_of_deepspeed(), without_progress_bars():
            model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        _drop_guessed_tokens(unfinished, model.get_input_embeddings().num_embeddings)
        _rewrite_text_files(unfinished)
    num_weights = sum(weight.numel() for weight in model.parameters())
    LOGGER.info(
        f"{model.config.model_type} of {num_weights:,} weights in {dtype}:"
        f" model=huggingface {type_setting('model.name', folder)}"
    )
    return 0


def _drop_guessed_tokens(folder: Path, num_tokens: int) -> None:
    """Drop the special tokens that the tokenizer of transformers has and the file has not.

    transformers adds those of the first model of a family, such as `<|endoftext|>` to a Llama 3: their ids are beyond
    the embeddings.
    """
    path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    guessed = {token["content"] for token in state["added_tokens"] if token["id"] >= num_tokens}
    if not guessed:
        return
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in guessed]
    write_atomically(path, json.dumps(state, ensure_ascii=False))
    config = json.loads(config_path.read_text(encoding="utf-8"))
    described = config.pop("added_tokens_decoder", None) or {}
    kept = {key: value for key, value in config.items() if not (isinstance(value, str) and value in guessed)}
    if described:
        kept["added_tokens_decoder"] = {key: value for key, value in described.items() if int(key) < num_tokens}
    write_atomically(config_path, json.dumps(kept, indent=2, ensure_ascii=False))


def _rewrite_text_files(folder: Path) -> None:
    """Write the stop tokens into the configs, and make the tokenizer load as it is."""
    try:
        tokenizer = read_folder(folder)
    except ConfigError as error:
        LOGGER.warning(f"{error.reason}: it cannot be trained on text, and its stop tokens are unknown")
        return
    write_text_side(folder, tokenizer=tokenizer, published=None)


def _check(file: Path, folder: Path) -> None:
    typed, fix = f"mode.path={file}", "mode.path=<a .gguf file>"
    if os.path.isdir(file):
        inside = sorted(path for path in file.glob("*.gguf") if path.is_file())
        if os.path.isfile(file / "config.json"):
            named = type_setting("model.name", file)
            fix = f"model=huggingface {named} instead of mode=convert_gguf, as it is read without"
        if inside:
            is_one = len(inside) == 1
            fix = type_setting("mode.path", inside[0]) if is_one else "mode.path=<one of the .gguf files in it>"
        raise ConfigError(typed, "it is a folder, not a file", fix)
    if not os.path.isfile(file):  # unlike Path.is_file, returns False if the name is too long
        raise ConfigError(typed, "there is no such file", fix)
    with reading(file, typed, fix), file.open("rb") as opened:
        head = opened.read(len(_MAGIC) + 4)
    if not head.startswith(_MAGIC):
        raise recognize(file, typed, fix) or ConfigError(typed, "it is not a GGUF file", fix)
    little, big = int.from_bytes(head[len(_MAGIC) :], "little"), int.from_bytes(head[len(_MAGIC) :], "big")
    if head[len(_MAGIC) :] and not {little, big} & {*_VERSIONS}:
        reason = f"it is of version {little:,} of GGUF, and versions {' and '.join(map(str, _VERSIONS))} are read"
        raise ConfigError(typed, reason, _ANOTHER)
    if os.path.lexists(folder):
        raise ConfigError(f"mode.output={folder}", "it already exists", "mode.output=<a new folder>")


def _load(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load model and tokenizer from a file, and check that the model is all that the file holds."""
    try:
        import gguf  # noqa: F401  transformers reads the file with it
        from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
        from transformers.utils.logging import tqdm
    except ImportError as error:
        reason = f"it needs the package {error.name}, which is not installed"
        raise ConfigError("mode=convert_gguf", reason, type_extra("huggingface")) from error
    typed = f"mode.path={file}"
    with reading(file, typed, _ANOTHER), tempfile.TemporaryDirectory() as alone:
        # in a folder of its own: transformers also reads the config.json that it finds beside a file, and asks on the
        # terminal whether to run the code that it names
        Path(alone, file.name).symlink_to(file)
        options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
        reader = _open(file, typed)
        _check_parts(reader, typed)
        _check_settings(reader, typed)
        quiet = patch.object(modeling_gguf_pytorch_utils, "tqdm", tqdm)  # its own bar cannot be switched off
        with without_warnings_of_torchao(), without_remarks(), without_progress_bars(), quiet:
            model, report = AutoModelForCausalLM.from_pretrained(alone, dtype=dtype, **CHECKED_AFTERWARDS, **options)
        check_loaded(report, typed, fitting=_ANOTHER)
        _check_whole(reader, model, typed)
        tokenizer = AutoTokenizer.from_pretrained(alone, **options)
    # transformers 5.23 considers the model quantized and refuses to save it, but its weights are dequantized by now
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _open(file: Path, typed: str) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # numpy's and its own, beyond the end of a file
        reason = f"{file} ends before what its header describes: its download was cut off, or it is damaged"
        raise ConfigError(typed, reason, "mode.path=<a complete copy of it>") from error


def _check_settings(reader: Any, typed: str) -> None:
    """Check that a file has the settings for which transformers would take defaults of its own."""
    architecture = str(_get(reader, "general.architecture", ""))
    names = [reader.get_field(f"{architecture}.{key}") and key for key in (*_NEEDED, *_EPSILONS)]
    missing = [key for key in _NEEDED if key not in names]
    missing += [] if any(key in names for key in _EPSILONS) else [_EPSILONS[0]]
    if missing:
        what = "setting" if len(missing) == 1 else "settings"
        listed = ", ".join(f"{architecture}.{key}" for key in missing)
        reason = f"it lacks the {what} {listed}, which would be guessed"
        raise ConfigError(typed, reason, _ANOTHER)
    # some architectures have a number for each block, and 0 in those without attention
    for key in _NEEDED:
        if (value := _get(reader, f"{architecture}.{key}", 1, of_list=1)) < 1:
            raise ConfigError(typed, f"it has {architecture}.{key}={value}, which no model can have", _ANOTHER)
    heads = _get(reader, f"{architecture}.attention.head_count", 0, of_list=0)
    groups = _get(reader, f"{architecture}.attention.head_count_kv", 1, of_list=1)
    if heads and (groups < 1 or heads % groups):
        reason = f"it has {architecture}.attention.head_count_kv={groups}, which does not divide its {heads} heads"
        raise ConfigError(typed, reason, _ANOTHER)


def _check_parts(reader: Any, typed: str) -> None:
    num_parts = _get(reader, "split.count", 1)
    if num_parts > 1:
        reason = f"it is one of the {num_parts} parts of a split model"
        fix = "mode.path=<the whole file>, from llama-gguf-split --merge <the first part> <the whole file>"
        raise ConfigError(typed, reason, fix)
    kind, architecture = _get(reader, "general.type", "model"), _get(reader, "general.architecture", "")
    if kind == "mmproj" or architecture == "clip":
        reason = "it is the projector of a multimodal model (mmproj), which turns images or sound into its inputs"
        raise ConfigError(typed, reason, "mode.path=<the file of its language model>")
    if kind != "model":
        raise ConfigError(typed, f"it is a file of the kind {kind}, not a model", "mode.path=<the file of its model>")
    if not reader.tensors:
        raise ConfigError(typed, "it holds a vocabulary and no weights", "mode.path=<a file with weights>")
    if (tokens := reader.get_field(_TOKENS)) is None:
        raise ConfigError(typed, f"it has no tokenizer ({_TOKENS})", _ANOTHER)
    if all(reader.get_field(key) is None for key in _ORDERS):
        reason = f"its tokenizer has neither merges nor scores ({', '.join(_ORDERS)}), and is built from one of them"
        raise ConfigError(typed, reason, _ANOTHER)
    num_rows = next((int(tensor.shape[-1]) for tensor in reader.tensors if tensor.name == _EMBEDDING), None)
    if num_rows not in (None, len(tokens.data)):
        reason = f"its tokenizer has {len(tokens.data):,} tokens, and its {_EMBEDDING} {num_rows:,} rows"
        raise ConfigError(typed, reason, _ANOTHER)


def _check_whole(reader: Any, model: Any, typed: str) -> None:
    """Check that the model has all numbers and settings of the file; set those settings that transformers leaves out.

    transformers (5.24) takes the tensors and settings that it knows, and logs nothing about others: the rotary scaling
    of Llama 3.1 to 3.3, biases, windows of attention.
    """
    config, architecture = model.config, str(_get(reader, "general.architecture", ""))
    rest = {tensor.name: tensor for tensor in reader.tensors}
    if _ROPE in rest:
        _set_llama3_rope(config, rest.pop(_ROPE).data, typed)
    for key, name in _SETTINGS.items():
        if (value := _get(reader, f"{architecture}.{key}", None)) is None:
            continue
        if not hasattr(config, name):
            raise ConfigError(typed, f"its setting {key}={value} has no place in a {config.model_type}", _ANOTHER)
        setattr(config, name, value)
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", _ROPE_THETA)
    if theta != _ROPE_THETA and _get(reader, f"{architecture}.rope.freq_base", None) is None:
        reason = f"it has no {architecture}.rope.freq_base, for which llama.cpp takes {_ROPE_THETA:g}, not {theta:g}"
        raise ConfigError(typed, reason, _ANOTHER)
    scaling = _get(reader, f"{architecture}.rope.scaling.type", "none")
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if scaling not in ("none", kind):
        reason = f"it scales rotary frequencies ({scaling}), which transformers does not read from a GGUF file"
        raise ConfigError(typed, reason, _ANOTHER)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() and not are_finite(tensor):
            raise ConfigError(typed, f"it holds NaN or inf in {name}: every loss would be NaN", _ANOTHER)
    own = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}  # tied ones once
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if is_tied and _HEAD in rest and np.array_equal(rest[_HEAD].data, rest[_EMBEDDING].data):
        del rest[_HEAD]
    num_further = _get(reader, f"{architecture}.nextn_predict_layers", 0)
    further = [name for name in rest if (block := _BLOCK.match(name)) and int(block[1]) >= config.num_hidden_layers]
    further = further if num_further else []
    log_unread(further, typed)
    found = sum(int(tensor.n_elements) for name, tensor in rest.items() if name not in further)
    if found != sum(own.values()):
        unknown = sorted(rest.keys() - _list_names(model, architecture)) or sorted(rest)
        shown = ", ".join(unknown[:_NUM_SHOWN]) + (", …" if unknown[_NUM_SHOWN:] else "")
        reason = f"it holds {found:,} numbers, and a {config.model_type} of transformers takes {sum(own.values()):,}"
        raise ConfigError(typed, f"{reason}: there is no place for {shown}", _ANOTHER)


def _list_names(model: Any, architecture: str) -> set[str]:
    """Return the names that llama.cpp gives to the tensors of a model; empty if they are not known."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        return set()
    names = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    return {names.get_name(name, try_suffixes=(".weight", ".bias")) or "" for name in model.state_dict()}


def _set_llama3_rope(config: Any, factors: Any, typed: str) -> None:
    """Set the rotary scaling that a file holds as one factor per channel pair, [Q / 2]."""
    divisors = torch.from_numpy(factors.copy()).float()
    if bool((divisors == 1).all()):
        return
    rope, factor = config.rope_parameters, float(divisors.max())
    theta, size = rope["rope_theta"], 2 * len(divisors)
    plain, scaled = (frequencies(size, theta=theta, scaling_factor=scale) for scale in (None, factor))
    if not torch.allclose(plain / divisors, scaled, rtol=1e-4, atol=0.0):  # float32 divided in another order
        reason = f"it scales rotary frequencies by {_ROPE} in another way than Llama 3.1 to 3.3"
        raise ConfigError(typed, reason, _ANOTHER)
    config.rope_parameters = {**rope, **LLAMA3_ROPE, "factor": factor}


def _get(reader: Any, key: str, default: Any, *, of_list: Any = None) -> Any:
    """Return a text or number among the settings of a file, `of_list` or the first one for a list of them."""
    field = reader.get_field(key)
    if field is None:
        return default
    if of_list is not None and field.types[0].name == "ARRAY":
        return of_list
    value = field.parts[field.data[0]]
    return bytes(value).decode() if field.types[0].name == "STRING" else value[0].item()
