"""Check which models of `transformers` are supported, and find their blocks.

They are causal language models of any type, and models of images and text of two types.
"""

import copy
import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.errors import ConfigError, type_extra, type_setting
from recipes.foreign_file import missing_config, missing_folder, reading
from recipes.model import Stack
from recipes.model.init import generator_for, unsharded_shape
from recipes.numerics.torchao_import import without_warnings_of_torchao
from recipes.shipped_models import find_model

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
# types of models with a tower of images and one of text (test_image_text.py)
IMAGE_TEXT = ("clip", "siglip")
# types of models that read images among tokens (test_llava.py), and of the towers that read these
VISION_LANGUAGE = ("llava",)
VISION_TOWERS = ("clip_vision_model", "siglip_vision_model")
CAUSAL = "a causal language model"  # what `model.name` is to name, in errors
OF_IMAGES_AND_TEXT = "a CLIP or SigLIP model"
OF_VISION_LANGUAGE = "a LLaVA model"
# bidirectional encoders, even if transformers lists them as causal models
_ENCODERS = ("bert", "electra", "ernie", "data2vec", "big_bird", "roformer", "xlm", "xlnet", "reformer", "xmod")
# settings that name files, code and tokens, or that say how a model is loaded, trained and sampled
_NOT_OF_WEIGHTS = {
    *("_name_or_path", "architectures", "auto_map", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("dtype", "torch_dtype", "use_cache", "chunk_size_feed_forward"),
    "image_seq_length",  # of LLaVA: follows from its tower, and files have the default of another one
    *("initializer_range", "initializer_factor", "logit_scale_init_value"),
    *("id2label", "label2id", "problem_type", "task_specific_params", "_attn_implementation", "attn_implementation"),
    *("output_attentions", "output_hidden_states", "return_dict", "pretraining_tp"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),  # heads of classifiers
}
_DROPS = re.compile(r"_pdrop|dropout")  # used in training only
_ROPE = "rope_parameters."
_SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
_SIZES |= {"head_dim", "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions"}
_SIZES |= {"image_size", "patch_size", "num_channels", "projection_dim", "projection_size"}  # of images and text
# windows of attention, and what logits and frequencies are divided by
_POSITIVE = re.compile(
    r"(^|_)(window|window_size|chunk_size)$|(?<!router_logit_)softcapping$|soft_cap$|logits_scaling$|scalar$"
    r"|rope_theta$|\.factor$"
)
_COUNTS = ("num_", "n_")
_EPSILON = re.compile(r"_eps(ilon)?$")
_FLOAT = "__float__"  # transformers writes inf as {"__float__": "Infinity"}
# settings of models that change the logits after the head, or the hidden states before it
_CHANGE_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
_MAX_SHOWN = 100  # characters of a setting: a list may have a value for each layer
_MAX_LAYERS = 1024  # as of our own models; they are built one by one
_configs: dict[str, Any] = {}
_said: set[str] = set()


def load_config(name: str, *, wanted: str = CAUSAL) -> Any:
    """Return the configuration of a published model, cached per process.

    Args:
        name: Folder, hub name, or name of a shipped model.
        wanted: What it is to be of, for errors.

    Raises:
        ConfigError: The model does not exist, or transformers is not installed.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        reason = "it needs the package transformers, which is not installed"
        raise ConfigError("model=huggingface", reason, type_extra("huggingface")) from error
    folder = find_model(name)
    is_folder = os.path.isdir(folder)  # unlike Path.is_dir, False if the name is too long
    if not is_folder and (wrong := missing_folder(name, "model.name")) is not None:
        raise wrong
    if is_folder and not os.path.lexists(Path(folder, "config.json")):
        raise missing_config(name, "model.name")
    if name not in _configs:
        with reading_model(name, wanted=wanted):
            _configs[name] = _read_published(folder if is_folder else name, f"model.name={name}")
    return copy.deepcopy(_configs[name])


def reading_model(name: str, *, wanted: str = CAUSAL) -> AbstractContextManager[None]:
    """Report whatever transformers raises on a published config.json as one `ConfigError`, which says where it is."""
    folder = find_model(name)
    if not os.path.isdir(folder):
        return reading(name, f"model.name={name}", _type_model(wanted))
    return reading(Path(folder, "config.json"), f"model.name={name}", _type_valid(wanted))


def _type_model(wanted: str) -> str:
    return f"model.name=<folder or hub id of {wanted}>"


def _type_valid(wanted: str) -> str:
    return f"model.name=<folder with a valid config.json of {wanted}>"


def list_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a config.json that change what the weights compute, as plain values.

    Those of a tower have its name before theirs: `text_config.hidden_size`.
    """
    found = _list_all(config)
    own = {key: key.rpartition(".")[2] for key in found}
    return {key: value for key, value in found.items() if own[key] not in _NOT_OF_WEIGHTS and not _DROPS.search(key)}


def _list_all(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for tower in list_towers(config):
        found |= {f"{tower}.{key}": value for key, value in found.pop(tower).items()}
    return found


def check_settings(config: Any, folder: Path, *, name: str, pretrained: str) -> None:
    """Check that weights belong to the model that another config.json describes.

    Shapes do not tell: with another rope_theta or activation, the same tensors compute something else.

    Args:
        config: Configuration of the model.
        folder: Folder with the weights and their own config.json.
        name: Folder or hub name that the configuration is from, as it was typed.
        pretrained: The same of the weights.

    Raises:
        ConfigError: Their config.json has a setting that changes the result.
    """
    typed = f"model.pretrained={pretrained}"
    with reading(folder / "config.json", typed, "model.pretrained=<folder with a valid config.json>"):
        theirs = _read_published(str(folder), typed)
        if theirs.model_type in VISION_LANGUAGE:
            drop_unread_layers(theirs)
        own, others = (_flatten(list_settings(found), of=type(found)) for found in (config, theirs))
    check_not_quantized(getattr(theirs, "quantization_config", None), typed)
    if config.model_type != theirs.model_type:
        reason = f"the weights are of a model of type {theirs.model_type}, and model.name is one of {config.model_type}"
        kinds = VISION_LANGUAGE if config.model_type in VISION_LANGUAGE else IMAGE_TEXT
        is_possible = _is_causal(type(theirs)) if _is_causal(type(config)) else theirs.model_type in kinds
        fix = (
            type_setting("model.name", pretrained)
            if is_possible
            else f"model.pretrained=<weights of a {config.model_type}>"
        )
        raise ConfigError(f"model.name={name} {typed}", reason, fix)
    if different := sorted(key for key in own.keys() | others.keys() if own.get(key) != others.get(key)):
        lines = (f"{key}={_show(others.get(key))}, not {_show(own.get(key))}" for key in different)
        reason = f"the weights are of another model: their config.json has {'; '.join(lines)}"
        fix = type_setting("model.name", pretrained)
        if all(key.startswith(_ROPE) for key in different):  # as for longer contexts
            copied = f"<a copy of {pretrained} with other rope_parameters in its config.json>"
            fix += f", or model.name={copied} without model.pretrained"
        raise ConfigError(f"model.name={name} {typed}", reason, fix)


def check_part(config: Any, folder: Path, *, setting: str) -> None:
    """Check that weights belong to the tower or decoder of a LLaVA model, by the config.json beside them.

    Args:
        config: Configuration of the part. It may have fewer layers, of which nobody reads the others, and more tokens.
        folder: Folder with the weights and their own config.json.
        setting: The override that named it, `key=value`.

    Raises:
        ConfigError: They are of another type, are quantized, or have a setting that changes the result.
    """
    key = setting.partition("=")[0]
    is_tower = config.model_type in VISION_TOWERS
    fix = f"{key}=<weights of a {config.model_type}>"
    with reading(folder / "config.json", setting, f"{key}=<folder with a valid config.json>"):
        theirs = _read_published(str(folder), setting)
        theirs = getattr(theirs, "vision_config", theirs) if is_tower else theirs
        check_not_quantized(getattr(theirs, "quantization_config", None), setting)
        if theirs.model_type != config.model_type:
            reason = f"the weights are of a model of type {theirs.model_type}, and the part is a {config.model_type}"
            raise ConfigError(setting, reason, fix)
        own, others = (_flatten(list_settings(found), of=type(found)) for found in (config, theirs))
    may_differ = ("num_hidden_layers", "vision_use_head") if is_tower else ("vocab_size",)
    different = sorted(name for name in own.keys() | others.keys() if own.get(name) != others.get(name))
    if different := [name for name in different if name not in may_differ]:
        lines = "; ".join(f"{name}={_show(others.get(name))}, not {_show(own.get(name))}" for name in different)
        raise ConfigError(setting, f"the weights are of another model: their config.json has {lines}", fix)


def _is_possible(key: str, value: object) -> bool:
    """Return whether a setting has a value with which a model can be built, and computes numbers."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    own = key.rpartition(".")[2]  # of a setting of a tower
    if own in _SIZES or _POSITIVE.search(key):
        return 0 < value < math.inf
    if _DROPS.search(key):
        return 0 <= value < 1
    return math.isfinite(value) and not (value < 0 and (_EPSILON.search(key) or own.startswith(_COUNTS)))


def _flatten(settings: Mapping[str, Any], *, of: type, keeps_positions: bool = False) -> dict[str, Any]:
    """Return the settings that a class of configurations knows, those of rotary embeddings one by one.

    Args:
        settings: Settings of a config.json.
        of: Class of configurations.
        keeps_positions: Whether the number of positions is one of them where the scaling of rotary frequencies does
            not depend on it: other models have as many rows of weights.
    """
    with without_remarks():  # about special tokens of a configuration that nobody has chosen
        known = _list_all(of())  # all else is a note of the program that wrote the file
    flat = {key: value for key, value in settings.items() if key in known}
    rope = flat.pop("rope_parameters", None) or {}
    if not keeps_positions and rope.get("rope_type", "default") == "default":
        flat.pop("max_position_embeddings", None)
    flat |= {f"{_ROPE}{key}": value for key, value in rope.items() if key != "type"}  # which is rope_type, too
    return {key: _read_infinity(value) for key, value in flat.items()}


def _read_infinity(value: Any) -> Any:
    return float(value[_FLOAT]) if isinstance(value, dict) and _FLOAT in value else value


def _is_causal(kind: type) -> bool:
    """Return whether transformers has a causal language model for a class of configurations."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return kind in MODEL_FOR_CAUSAL_LM_MAPPING


def _read_published(name: str, setting: str) -> Any:
    """Return the configuration in a folder or hub repository.

    Raises:
        ConfigError: transformers does not know models of its type, or only with code of the repository.
    """
    import transformers

    settings, _ = transformers.PreTrainedConfig.get_config_dict(name)
    kind, key = settings.get("model_type"), setting.partition("=")[0]
    if isinstance(kind, str) and kind not in transformers.CONFIG_MAPPING:
        version = f"transformers {transformers.__version__}"
        if settings.get("auto_map"):
            reason = f"{version} knows no models of type {kind[:_MAX_SHOWN]}, and code of the repository is not run"
            raise ConfigError(setting, reason, f"{key}=<a model that needs no code of its own>")
        reason = f"{version} knows no models of type {kind[:_MAX_SHOWN]}"
        raise ConfigError(
            setting, reason, f"{key}=<a model of another type>, or pip install -U transformers if it is new"
        )
    for dtype in {settings.get("dtype"), settings.get("torch_dtype")} - {None, "auto"}:
        if not isinstance(getattr(torch, str(dtype).removeprefix("torch."), None), torch.dtype):
            reason = f"its config.json has dtype={_show(dtype)}, which is none of torch"
            raise ConfigError(setting, reason, f"{key}=<folder with a valid config.json>")
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    kernel = config._attn_implementation
    if kernel not in (None, "eager", "sdpa"):  # of a package that may be missing here; it changes no result
        config._attn_implementation = None
        log.info("Not read from %s: attn_implementation=%s, as attention= chooses the kernel", name, _show(kernel))
    return config


def _show(value: object) -> str:
    return json.dumps(value)[:_MAX_SHOWN]


@contextmanager
def without_remarks() -> Iterator[None]:
    """Keep transformers from printing what is found here, too, such as a table of tensors that do not fit."""
    from transformers.utils import logging as of_transformers

    level = of_transformers.get_verbosity()
    of_transformers.set_verbosity_error()
    try:
        yield
    finally:
        of_transformers.set_verbosity(level)


def find_class(config: Any) -> Any:
    """Return the class of transformers that builds and loads models with a configuration."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    if config.model_type in VISION_LANGUAGE:
        return AutoModelForImageTextToText
    return AutoModel if config.model_type in (*IMAGE_TEXT, *VISION_TOWERS) else AutoModelForCausalLM


def make_model(config: Any) -> Any:
    """Build a model from a configuration, on the current device in the default dtype."""
    with without_warnings_of_torchao():
        return find_class(config).from_config(config, dtype=torch.get_default_dtype(), trust_remote_code=False)


def make_published(config: Any, *, name: str, wanted: str = CAUSAL) -> Any:
    """Build a model as its config.json describes it, as `make_model` does.

    Args:
        config: Configuration of the model.
        name: Folder or hub name that it is from.
        wanted: What it is to be of, for errors.

    Raises:
        ConfigError: transformers does not know one of the names in it, such as that of an activation.
    """
    try:
        return make_model(config)
    except KeyError as error:
        flat = _flatten(list_settings(config), of=type(config))
        unknown = next((key for key, value in flat.items() if value == error.args[0]), None)
        if unknown is None:
            raise
        reason = f"its config.json has {unknown}={_show(flat[unknown])}, which transformers does not know"
        raise ConfigError(f"model.name={name}", reason, _type_valid(wanted)) from error


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


def draw_decoder(
    fresh: Any, *, blocks: str, seed: int, only: Collection[str] | None = None, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield initial values of parameters and buffers of a decoder by name, drawn on the CPU one unit at a time.

    A unit is a block, because models scale the end of a residual branch there, or a module outside blocks.

    Args:
        fresh: Decoder on the meta device, whose `_init_weights` has its rules.
        blocks: Name of its list of blocks.
        seed: Seed of the run.
        only: Names of modules whose values are wanted; None: all.
        prefix: Of names that are yielded and in `only`, and of those that are drawn from.
    """
    of_blocks = f"{prefix}{blocks}."
    for own, module in list(fresh.named_modules()):
        name = f"{prefix}{own}".removesuffix(".")
        is_block = name.startswith(of_blocks) and "." not in name.removeprefix(of_blocks)
        if name.startswith(of_blocks) and not is_block:
            continue
        if only is not None and not any(unit == name or (is_block and unit.startswith(f"{name}.")) for unit in only):
            continue
        if not is_block and not any(True for _ in _own_tensors(module)):
            continue
        module.to_empty(device="cpu", recurse=is_block)
        _draw(fresh, reversed(list(module.modules())) if is_block else [module], name=name, seed=seed)
        found = [*module.named_parameters(recurse=is_block), *module.named_buffers(recurse=is_block)]
        yield from ((f"{name}.{own_name}" if name else own_name, value.detach()) for own_name, value in found)
        module.to_empty(device="meta", recurse=is_block)


def draw_tower(fresh: Any, *, seed: int, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield initial values of the parameters of a model of towers by name, drawn on the CPU one unit at a time.

    A unit is a module that the model declares unsplittable, or another one with those of its children that have none,
    because a module of transformers sets the weights of its children, too.

    Args:
        fresh: Model on the meta device, whose `_init_weights` has its rules.
        seed: Seed of the run.
        prefix: Of names that are yielded and drawn from.
    """
    whole = [name for name, module in fresh.named_modules() if type(module).__name__ in fresh._no_split_modules]
    for own, module in list(fresh.named_modules()):
        if any(own.startswith(f"{unit}.") for unit in whole):
            continue
        if own in whole:
            parts = dict(module.named_modules())
        else:
            parts = {key: child for key, child in module.named_children() if not any(child.children())}
        drawn = {key: part for key, part in parts.items() if any(True for _ in part.parameters(recurse=False))}
        if not drawn:
            continue
        for part in parts.values():
            part.to_empty(device="cpu", recurse=False)
        name = f"{prefix}{own}".removesuffix(".")
        _draw(fresh, reversed([module, *parts.values()]), name=name, seed=seed)  # children first
        start = f"{name}." if name else ""
        for key, part in drawn.items():
            at = f"{start}{key}." if key else start
            for own_name, value in part.named_parameters(recurse=False):
                yield f"{at}{own_name}", value.detach()
        for part in parts.values():
            part.to_empty(device="meta", recurse=False)


def _draw(fresh: Any, parts: Iterable[nn.Module], *, name: str, seed: int) -> None:
    """Draw the values of the parts of a unit from (seed, name), which transformers does off the meta device only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_for(name, seed=seed).initial_seed())
        for part in parts:
            fresh._init_weights(part)


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


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
    """Reject models that are not causal or are quantized, and settings that no model can have.

    Raises:
        ConfigError: It is one of them.
    """
    typed, kind = f"model.name={name}", config.model_type
    _check_values(config, typed, wanted=CAUSAL)
    read, num_experts = getattr(config, "num_experts_per_tok", None) or 0, count_experts(config)
    if num_experts and read > num_experts:
        reason = f"its config.json has num_experts_per_tok={read}, more than its {num_experts} experts"
        raise ConfigError(typed, reason, _type_valid(CAUSAL))
    if config.get_text_config() is not config:
        raise ConfigError(typed, f"a model of type {kind} reads more than text", "model.name=<its text model>")
    is_encoder = kind not in COMPARED and any(part in kind for part in _ENCODERS)
    if is_encoder or getattr(config, "is_encoder_decoder", False):
        reason = f"a model of type {kind} is an encoder, in which a token sees those after it"
        if getattr(config, "is_encoder_decoder", False):
            reason = f"a model of type {kind} has an encoder of another input before its decoder"
        raise ConfigError(typed, reason, _type_model(CAUSAL))
    if not _is_causal(type(config)):
        reason = f"a model of type {kind} is no causal language model, which predicts the next token"
        raise ConfigError(typed, reason, _type_model(CAUSAL))


def _check_values(config: Any, typed: str, *, wanted: str) -> None:
    """Reject models that are quantized or have too many layers, and settings that no model can have.

    Raises:
        ConfigError: It is one of them.
    """
    flat = _flatten(list_settings(config), of=type(config), keeps_positions=True)
    flat |= {key: value for key, value in _list_all(config).items() if _DROPS.search(key)}
    if flat.get("use_sliding_window") is False:
        flat.pop("sliding_window", None)  # not read, and 0 by default in some architectures
    wrong = next((key for key, value in flat.items() if not _is_possible(key, value)), None)
    if wrong is not None:
        reason = f"its config.json has {wrong}={_show(flat[wrong])}, which no model can have"
        raise ConfigError(typed, reason, _type_valid(wanted))
    num_layers = max(getattr(each, "num_hidden_layers", 1) for each in (config, *list_towers(config).values()))
    if num_layers > _MAX_LAYERS:
        reason = f"its config.json has {num_layers:,} layers, of which {_MAX_LAYERS:,} are the most"
        raise ConfigError(typed, reason, "model.name=<a model with fewer>")
    check_not_quantized(getattr(config, "quantization_config", None), typed)


def list_towers(config: Any) -> dict[str, Any]:
    """Return the configurations of the towers of a model by name; empty for a language model."""
    return {tower: getattr(config, tower) for tower in config.sub_configs}


def check_image_text(config: Any, *, name: str) -> None:
    """Reject models that are not of images and text, that are quantized, or whose features cannot be compared.

    Raises:
        ConfigError: It is one of them.
    """
    typed, kind = f"model.name={name}", config.model_type
    if kind not in IMAGE_TEXT:
        reason = f"a model of type {kind} is neither of type {' nor '.join(IMAGE_TEXT)}"
        raise ConfigError(typed, reason, _type_model(OF_IMAGES_AND_TEXT))
    _check_values(config, typed, wanted=OF_IMAGES_AND_TEXT)
    images, text = config.vision_config, config.text_config
    _check_pixels(images, typed, tower="vision_config.")
    if kind != "siglip":
        return
    if not images.vision_use_head:
        reason = "its config.json has vision_config.vision_use_head=false, without which an image has no features"
        raise ConfigError(typed, reason, _type_valid(OF_IMAGES_AND_TEXT))
    if text.projection_size != images.hidden_size:
        reason = f"its captions have {text.projection_size} features, and its images {images.hidden_size}"
        raise ConfigError(typed, reason, _type_valid(OF_IMAGES_AND_TEXT))


def join_configs(vision: str, language: str, *, feature_layer: int) -> Any:
    """Return the configuration of a LLaVA model with the tower of one model and the decoder of another.

    Args:
        vision: Folder or hub name of a CLIP or SigLIP model, or of its tower.
        language: Folder or hub name of a causal language model.
        feature_layer: Layer of the tower whose features are read.

    Raises:
        ConfigError: One of them does not exist, or cannot be part of such a model.
    """
    from transformers import LlavaConfig

    with naming_part("vision"), reading_model(vision, wanted=OF_IMAGES_AND_TEXT):
        images = load_config(vision, wanted=OF_IMAGES_AND_TEXT)
        tower = getattr(images, "vision_config", images)
        _check_tower(tower, f"model.name={vision}")
    with naming_part("language"), reading_model(language):
        text = load_config(language)
        check_kind(text, name=language)
        head = make_model_on_meta(text).get_output_embeddings()
        if changes_logits(text) or getattr(head, "bias", None) is not None:
            what = "changes the logits of its head" if changes_logits(text) else "has a bias in its head"
            reason = f"a model of type {text.model_type} {what}, which a LLaVA model of transformers does not"
            raise ConfigError(f"model.name={language}", reason, "model.name=<a Llama, Mistral, Qwen and the like>")
    strategy = "default" if tower.model_type == "clip_vision_model" else "full"
    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=text.tie_word_embeddings,
    )


@contextmanager
def naming_part(part: str) -> Iterator[None]:
    """Let errors about a model of `model.name` name the setting of a part."""
    try:
        yield
    except ConfigError as error:
        said = (text.replace("model.name", f"model.{part}") for text in (error.setting, error.reason, error.fix))
        raise ConfigError(*said) from error


def read_vision_language(config: Any, *, name: str) -> Any:
    """Return the configuration of a LLaVA model, checked.

    Raises:
        ConfigError: It is of another type, is quantized, or has another tower.
    """
    typed = f"model.name={name}"
    if config.model_type not in VISION_LANGUAGE:
        reason = f"a model of type {config.model_type} is not of type {' or '.join(VISION_LANGUAGE)}"
        raise ConfigError(typed, reason, _type_model(OF_VISION_LANGUAGE))
    _check_values(config, typed, wanted=OF_VISION_LANGUAGE)
    _check_tower(config.vision_config, typed)
    return config


def _check_tower(tower: Any, typed: str) -> None:
    if tower.model_type not in VISION_TOWERS:
        reason = f"its images are read by a {tower.model_type}, and this model has a tower of CLIP or SigLIP"
        raise ConfigError(typed, reason, _type_model(OF_IMAGES_AND_TEXT))
    _check_values(tower, typed, wanted=OF_IMAGES_AND_TEXT)
    _check_pixels(tower, typed, tower="")


def _check_pixels(images: Any, typed: str, *, tower: str) -> None:
    for key in ("image_size", "patch_size"):
        if not isinstance(getattr(images, key), int):
            reason = f"its config.json has {tower}{key}={_show(getattr(images, key))}, which is not one number"
            raise ConfigError(typed, reason, _type_valid(OF_IMAGES_AND_TEXT))
    if images.patch_size > images.image_size:
        reason = f"its images have {images.image_size} pixels a side, and a patch {images.patch_size}"
        raise ConfigError(typed, reason, _type_valid(OF_IMAGES_AND_TEXT))


def drop_unread_layers(config: Any) -> None:
    """Leave out the layers of a tower behind the last one whose features a LLaVA model reads, and its pooling head.

    Raises:
        ConfigError: There is no such layer.
    """
    tower, read = config.vision_config, config.vision_feature_layer
    number = tower.num_hidden_layers
    given = [read] if isinstance(read, int) else [*read]
    places = [place + number + 1 if place < 0 else place for place in given]  # 0: before the first layer
    if not places or max(places) > number or min(places) < 0 or not max(places):
        reason = f"the tower has {number} layers"
        raise ConfigError(f"model.vision_feature_layer={read}", reason, "model.vision_feature_layer=-2")
    tower.num_hidden_layers = last = max(places)
    config.vision_feature_layer = -1 if isinstance(read, int) else [place - last - 1 for place in places]
    if tower.model_type == "siglip_vision_model":
        tower.vision_use_head = False


def changes_logits(config: Any) -> bool:
    """Return whether a decoder changes the logits after its head, or the hidden states before it."""
    return any(getattr(config, key, None) not in (None, 1, 1.0) for key in _CHANGE_LOGITS)


def count_experts(config: Any) -> int:
    """Return the number of experts that a token is routed to; 0 for a model without experts."""
    keys = ("num_local_experts", "n_routed_experts", "num_experts")
    return next((number for key in keys if isinstance(number := getattr(config, key, None), int)), 0)


def warn_of_untested(kind: str) -> None:
    """Warn once of an architecture whose logits were not compared with those of transformers."""
    if kind not in COMPARED and kind not in _said:
        _said.add(kind)
        log.warning(
            "Models of type %s were not compared with transformers: all logits exist at once, examples are not packed",
            kind,
        )


def check_not_quantized(quantization: object, setting: str) -> None:
    """Check that weights are published as they are trained.

    Args:
        quantization: The `quantization_config` of their config.json.
        setting: The override that named them, `key=value`.

    Raises:
        ConfigError: They are in fewer bits.
    """
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    how = f" ({method})" if isinstance(method, str) else ""
    reason = f"its weights are quantized{how}, and such weights are not trained here"
    key = setting.partition("=")[0]
    fix = f"{key}=<the same model in float32 or bfloat16>; adapter=qlora then keeps its weights in 4 bits"
    raise ConfigError(setting, reason, fix)


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
