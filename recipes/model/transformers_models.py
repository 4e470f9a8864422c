"""Check which causal language models of `transformers` are supported, and find their blocks."""

import copy
import logging
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.errors import ConfigError
from recipes.foreign_file import missing_config, missing_folder, reading
from recipes.model import Stack
from recipes.model.init import unsharded_shape
from recipes.numerics.torchao_import import without_warnings_of_torchao

log = logging.getLogger("lightning_recipes")

# architectures tested against transformers 5.23: logits, packed documents and saved files (test_huggingface.py)
COMPARED = frozenset(
    {
        *(
            "arcee",
            "codegen",
            "cohere",
            "cohere2",
            "ernie4_5",
            "exaone4",
            "gemma",
            "gemma2",
            "gemma3_text",
            "glm",
            "glm4",
        ),
        *(
            "gpt2",
            "gpt_bigcode",
            "gpt_neox",
            "gptj",
            "granite",
            "granitemoe",
            "llama",
            "mistral",
            "mixtral",
            "nemotron",
        ),
        *("olmo", "olmo2", "olmoe", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
        *("stablelm", "starcoder2"),
    }
)
# bidirectional encoders, even if transformers lists them as causal models
_ENCODERS = ("bert", "electra", "ernie", "data2vec", "big_bird", "roformer", "xlm", "xlnet", "reformer", "xmod")
_FIX = "model.name=<folder or hub id of a causal language model>"
_MAX_LAYERS = 1024  # as of our own models; they are built one by one
_configs: dict[str, Any] = {}
_said: set[str] = set()


def load_config(name: str) -> Any:
    """Return the configuration of a published model, cached per process.

    Raises:
        ConfigError: The model does not exist, or transformers is not installed.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        reason = "it needs the package transformers, which is not installed"
        raise ConfigError("model=huggingface", reason, "pip install -e '.[huggingface]'") from error
    folder = os.path.expanduser(name)
    is_folder = os.path.isdir(folder)  # unlike Path.is_dir, False if the name is too long
    if not is_folder and (wrong := missing_folder(name, "model.name")) is not None:
        raise wrong
    if is_folder and not os.path.lexists(Path(folder, "config.json")):
        raise missing_config(name, "model.name")
    if name not in _configs:
        with reading_model(name):
            _configs[name] = AutoConfig.from_pretrained(folder if is_folder else name, trust_remote_code=False)
    return copy.deepcopy(_configs[name])


def reading_model(name: str) -> AbstractContextManager[None]:
    """Report whatever transformers raises on a published config.json as one `ConfigError`, which says where it is."""
    folder = os.path.expanduser(name)
    if not os.path.isdir(folder):
        return reading(name, f"model.name={name}", _FIX)
    fix = "model.name=<folder with a valid config.json of a causal language model>"
    return reading(Path(folder, "config.json"), f"model.name={name}", fix)


def make_model(config: Any) -> Any:
    """Build a causal language model from a configuration, on the current device in the default dtype."""
    from transformers import AutoModelForCausalLM

    with without_warnings_of_torchao():
        return AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), trust_remote_code=False)


def make_model_on_meta(config: Any) -> Any:
    """Build the model on the meta device, without storage."""
    with torch.device("meta"):
        return make_model(config)


def find_blocks(inner: Any, *, name: str) -> tuple[str, str]:
    """Return the name of the module that holds the blocks, and the name of the block list in it.

    Raises:
        ConfigError: The model has no blocks.
    """
    whole = set(inner._no_split_modules or ())
    number = getattr(inner.config, "num_hidden_layers", None)
    for path, module in inner.named_modules():
        if number is not None and isinstance(module, nn.ModuleList) and len(module) != number:
            continue
        if isinstance(module, nn.ModuleList) and len(module) and type(module[0]).__name__ in whole:
            parent, _, own = path.rpartition(".")
            return parent, own
    reason = f"{type(inner).__name__} does not say which of its modules are blocks (_no_split_modules)"
    raise ConfigError(f"model.name={name}", reason, "model.name=<another model>, or model=llama_1b and the like")


# layers that compute several matrix products at once, under the names that models of transformers give them
_FUSED = re.compile(
    r"c_attn|qkv|query_key_value|gate_(and_)?up|in_proj|kv_proj|^(wi|w12|w13|input_linear)$", re.IGNORECASE
)


def find_stacks(inner: Any) -> dict[str, Stack | None]:
    """Return the matrices in the weights of fused layers, by layer; None where it is not known which there are.

    Read from the forward passes of transformers 5.24.
    """
    found: dict[str, Stack | None] = {}
    for name, module in inner.named_modules():
        own = name.rpartition(".")[2]
        if isinstance(getattr(module, "weight", None), torch.Tensor) and _FUSED.search(own):
            found[name] = _find_stack(inner.config, own, module)
    return found


def _find_stack(config: Any, own: str, module: Any) -> Stack | None:
    kind, heads = config.model_type, getattr(config, "num_attention_heads", 1)
    shape = unsharded_shape(module.weight)
    outputs = shape[1] if kind == "gpt2" else shape[0]  # GPT-2 stores weights as [inputs, outputs]
    head = outputs // (3 * heads)  # features of a head where keys and values have as many heads as queries
    if own == "gate_up_proj":
        return Stack((outputs // 2, outputs // 2))
    if kind == "gpt2":
        return Stack((outputs // 3,) * 3, by_columns=True)
    if kind in ("gpt_neox", "persimmon") or (kind == "gpt_bigcode" and not config.multi_query):
        return Stack((head,) * 3, num_groups=heads)
    if kind == "gpt_bigcode":
        keys = config.hidden_size // heads
        return Stack((outputs - 2 * keys, keys, keys))
    if kind == "codegen":  # stored for four devices, whatever their number
        return Stack((outputs // 12,) * 3, num_groups=4)
    if kind == "phi3":
        keys = config.num_key_value_heads * (outputs // (heads + 2 * config.num_key_value_heads))
        return Stack((outputs - 2 * keys, keys, keys))
    return None


def check_kind(config: Any, *, name: str) -> None:
    """Reject models that are not causal or are quantized, and warn about untested architectures.

    Raises:
        ConfigError: The model is not a causal language model, or is quantized.
    """
    typed, kind = f"model.name={name}", config.model_type
    num_layers = getattr(config, "num_hidden_layers", 1)
    if num_layers > _MAX_LAYERS:
        reason = f"its config.json has {num_layers:,} layers, of which {_MAX_LAYERS:,} are the most"
        raise ConfigError(typed, reason, "model.name=<a model with fewer>")
    if getattr(config, "quantization_config", None):
        reason = "its weights are quantized, and their scales would be lost"
        raise ConfigError(typed, reason, "model.name=<the same model in float32 or bfloat16>")
    if config.get_text_config() is not config:
        raise ConfigError(typed, f"a model of type {kind} reads more than text", "model.name=<its text model>")
    is_encoder = kind not in COMPARED and any(part in kind for part in _ENCODERS)
    if is_encoder or getattr(config, "is_encoder_decoder", False):
        reason = f"a model of type {kind} is an encoder, in which a token sees those after it"
        if getattr(config, "is_encoder_decoder", False):
            reason = f"a model of type {kind} has an encoder of another input before its decoder"
        raise ConfigError(typed, reason, "model.name=<a causal language model>")
    if kind not in COMPARED and kind not in _said:
        _said.add(kind)
        log.warning(
            "Models of type %s were not compared with transformers: all logits exist at once, examples are not packed",
            kind,
        )


def check_sizes(config: Any, *, max_seq_len: int, vocab_size: int) -> None:
    """Check what was set against the sizes in config.json.

    Raises:
        ConfigError: The model has fewer positions, or another vocabulary, or treats long rows in another way.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and max_seq_len > positions:
        reason = f"the model has {positions} positions"
        raise ConfigError(f"model.max_seq_len={max_seq_len}", reason, f"model.max_seq_len={positions}")
    short = _find_short_context(text)
    if short is not None and max_seq_len > short:
        reason = f"its rotary frequencies (LongRoPE) change for a whole batch in which an example has more than {short}"
        reason += " tokens, so that losses would depend on the neighbors of an example"
        raise ConfigError(f"model.max_seq_len={max_seq_len}", reason, f"model.max_seq_len={short}")
    if vocab_size != text.vocab_size:
        reason = f"config.json has {text.vocab_size} tokens"
        raise ConfigError(f"model.vocab_size={vocab_size}", reason, f"model.vocab_size={text.vocab_size}")


def _find_short_context(text: Any) -> int | None:
    """Return the most tokens for which LongRoPE takes its short factors; None for a model without LongRoPE.

    transformers (5.24) compares it with the largest position of a whole call, in `longrope_frequency_update`.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # for all layers, or for each kind of them
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
    return None
