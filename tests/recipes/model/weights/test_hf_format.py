"""Published weights are compared with the model before they are loaded: every difference is listed with its fix."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typed_remedies import read_remedies, replace

from recipes.config import compose_and_check
from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.model.resnet import ResNet18
from recipes.model.weights.hf_deepseek import DeepSeekV3Format
from recipes.model.weights.hf_gpt2 import GPT2Format
from recipes.model.weights.hf_llama import LlamaFormat
from recipes.model.weights.hf_mixtral import MixtralFormat
from recipes.model.weights.huggingface import export_pretrained, load_pretrained

torch.set_num_threads(1)

COMMON = {"vocab_size": 101, "max_seq_len": 24, "num_layers": 2, "num_heads": 4, "hidden_size": 32}
GPT2_SHAPES = COMMON | {"dropout": 0.0}
LLAMA_SHAPES = COMMON | {"num_kv_heads": 2, "ffn_hidden_size": 96, "rope_theta": 500.0}


def ours(architecture: str, **changes: object) -> GPT2 | Llama:
    shapes, make = (GPT2_SHAPES, GPT2) if architecture == "gpt2" else (LLAMA_SHAPES, Llama)
    return make(**(shapes | changes))  # type: ignore[arg-type]


def publish(model: GPT2 | Llama, folder: Path) -> None:
    model.init_weights(0)
    export_pretrained(model, folder)


def test_every_difference_is_listed_with_its_override_and_nothing_is_loaded(
    tmp_path: Path,
) -> None:
    publish(ours("gpt2"), tmp_path)
    model = ours("gpt2", num_layers=3, hidden_size=48, tie_embeddings=False)
    model.init_weights(0)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match="does not fit") as error:
        load_pretrained(model, tmp_path)
    assert str(error.value).endswith("type model.num_layers=2 model.hidden_size=32 model.tie_embeddings=true")
    assert str(error.value).count("the weights have") == 3
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.parametrize(
    ("changes", "override"),
    [
        ({"num_kv_heads": 4}, "model.num_kv_heads=2"),
        ({"qk_norm": True}, "model.qk_norm=false"),
        ({"rope_scaling_factor": 8.0}, "model.rope_scaling_factor=null"),
        ({"rope_theta": 10000.0}, "model.rope_theta=500.0"),
        ({"rope_theta": 500000}, "model.rope_theta=500.0"),  # typed without a point
        ({"rms_eps": 1e-6}, "model.rms_eps=1e-05"),
        ({"max_seq_len": 25}, "model.max_seq_len=24"),
        ({"vocab_size": 100}, "model.vocab_size=101"),
        ({"head_dim": 16}, "model.head_dim=8"),
    ],
)
def test_each_setting_of_llama_is_compared(changes: dict[str, object], override: str, tmp_path: Path) -> None:
    publish(ours("llama"), tmp_path)
    with pytest.raises(ValueError, match="does not fit") as error:
        load_pretrained(ours("llama", **changes), tmp_path)
    assert str(error.value).endswith(f"; type {override}")


def test_a_shorter_context_than_that_of_the_weights_is_no_difference(tmp_path: Path) -> None:
    publish(ours("llama"), tmp_path)
    model = ours("llama", max_seq_len=12)
    load_pretrained(model, tmp_path)
    assert model.rope_cos.shape == (12, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "phi3"),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}),
    ],
)
def test_what_no_override_can_fix_is_rejected(key: str, value: object, tmp_path: Path) -> None:
    publish(ours("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ConfigError, match=f"type model=huggingface model.name={tmp_path} ") as caught:
        load_pretrained(ours("llama"), tmp_path)
    if key == "model_type":  # whose config.json has keys of its own
        return
    sizes = [f"model.{name}={size}" for name, size in LLAMA_SHAPES.items()]
    command = ["data=random_tokens", "seq_len=16", "model=llama_nano", *sizes, f"model.pretrained={tmp_path}"]
    [remedy] = read_remedies(caught.value)
    _, mistakes = compose_and_check(replace([*command, "tokenizer=none"], caught.value, remedy))
    assert not mistakes


DEFAULTS: dict[str, tuple[Any, dict[str, int]]] = {
    "gpt2": (GPT2Format, {"n_embd": 64, "n_head": 4}),
    "llama": (LlamaFormat, {"hidden_size": 64, "num_attention_heads": 8}),
    "qwen3": (LlamaFormat, {"hidden_size": 64, "num_attention_heads": 64}),
    "mixtral": (MixtralFormat, {"hidden_size": 64, "num_attention_heads": 16}),
    "deepseek_v3": (DeepSeekV3Format, {"hidden_size": 256, "num_attention_heads": 128}),
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_what_a_config_does_not_state_has_the_default_of_its_kind_in_transformers(kind: str) -> None:
    layout, sizes = DEFAULTS[kind]
    full = layout.with_defaults(layout.__new__(layout), {"model_type": kind} | sizes)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    theirs = config.to_dict() | {"rope_theta": (getattr(config, "rope_parameters", None) or {}).get("rope_theta")}
    theirs["head_dim"] = theirs.get("head_dim") or sizes.get("hidden_size", 0) // sizes.get("num_attention_heads", 1)
    own = {key for key in full if key in theirs and key != "rope_parameters"}
    if kind == "deepseek_v3":
        own -= {"head_dim", "num_local_experts"}  # the rotary part of a head, and another name of n_routed_experts
    assert len(own) >= 8
    assert {key: full[key] for key in own} == {key: theirs[key] for key in own}


# what each breaks -> the clause that names it; the value of our own setting would be refused
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "list": ("llama", {}, "holds a list instead of settings"),
    "text": ("llama", {}, "config.json cannot be read: JSONDecodeError"),
    "deep": ("llama", {}, "config.json cannot be read: RecursionError"),
    "encoder": (
        "llama",
        {"model_type": "t5", "num_heads": 4},
        "and this model is of the type llama or qwen3; type model.pretrained=<weights of a llama",
    ),
    "images": (
        "gpt2",
        {"model_type": "llava", "text_config": {}},
        "of the type gpt2; type model.pretrained=<weights of a gpt2>",
    ),
    "kind": ("llama", {"model_type": ["llama"]}, "of the type ['llama'], and"),
    "no kind": (
        "llama",
        {"model_type": None},
        "has no model_type, and this model is of the type llama or qwen3",
    ),
    "no heads": ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0 instead of a whole number above 0"),
    "three heads": ("llama", {"num_attention_heads": 3, "head_dim": None, "num_key_value_heads": 3}, "does not divide"),
    "key heads": ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide 4 heads"),
    "gpt2 heads": ("gpt2", {"n_head": 3}, "n_head=3 does not divide n_embd=32"),
    "layers": ("llama", {"num_hidden_layers": -1}, "num_hidden_layers=-1, which no model can have"),
    "layer text": ("gpt2", {"n_layer": "2"}, "n_layer=2, which no model can have"),
    "eps": ("llama", {"rms_norm_eps": "abc"}, "rms_norm_eps=abc, which no model can have"),
    "nan": ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, which no model can have"),
    "theta": ("llama", {"rope_theta": -1.0}, "rope_theta=-1.0, which no model can have"),
    "tied": ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings=no, which no model can have"),
    "scaling": ("llama", {"rope_scaling": 3}, "cannot be read: TypeError"),
    "quantization": ("llama", {"quantization_config": 3}, "its weights are quantized, and"),
    "quantized": ("llama", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized (fp8)"),
    "no positions": ("llama", {"max_position_embeddings": None}, "max_position_embeddings is null instead of a whole"),
    "scaling kind": ("llama", {"rope_scaling": {"rope_type": "magic"}}, "magic"),
    "activation": ("llama", {"hidden_act": "SiLU"}, 'hidden_act="SiLU", which transformers does not know'),
    "odd heads": ("llama", {"head_dim": 7}, "requires an even rotary dimension"),
    "more layers": (
        "llama",
        {"num_hidden_layers": 3},
        "of 2 blocks, and its config.json describes 3",
    ),
    "tied to another": (
        "llama",
        {"tie_word_embeddings": True},
        "ties lm_head.weight to model.embed_tokens.weight, but",
    ),
    "no head": ("gpt2", {"tie_word_embeddings": False}, "=false, and the file has no lm_head.weight"),
    "more rows": ("llama", {"vocab_size": 61}, "has the shape "),
    "partial": ("llama", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("gpt2", "llama")}
    for kind, folder in folders.items():
        publish(ours(kind), folder)
    return folders


@pytest.mark.parametrize("broken", BROKEN)
def test_a_config_that_describes_no_model_is_not_advised(
    broken: str, published: dict[str, Path], tmp_path: Path
) -> None:
    kind, changes, reason = BROKEN[broken]
    texts = {"list": "[1]", "text": "{", "deep": "[" * 100_000}
    config = json.loads((published[kind] / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(texts.get(broken, json.dumps(config)))
    (tmp_path / "model.safetensors").symlink_to(published[kind] / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        load_pretrained(ours(kind), tmp_path)
    assert reason in str(error.value)
    advised = ("model.pretrained=<", f"model=huggingface model.name={tmp_path}", "the same command, with")
    assert error.value.fix.startswith(advised)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_head_of_its_own_in_files_that_are_said_to_be_tied_is_not_dropped(
    kind: str, published: dict[str, Path], tmp_path: Path
) -> None:
    publish(ours(kind, tie_embeddings=True), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    embedding = weights["transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, file)
    load_pretrained(ours(kind, tie_embeddings=True), tmp_path)
    save_file(weights | {"lm_head.weight": embedding + 0.01}, file)
    with pytest.raises(ConfigError, match=r"ties lm_head\.weight to .*other values.*\"tie_word_embeddings\": false"):
        load_pretrained(ours(kind, tie_embeddings=True), tmp_path)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "model.", "-model."])
def test_what_wrappers_and_bare_models_do_to_names_is_undone(
    prefix: str, published: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(published["llama"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    remove = prefix[1:] if prefix.startswith("-") else ""
    weights = {name.removeprefix(remove): values for name, values in load_file(file).items()}
    save_file({name if remove else f"{prefix}{name}": values for name, values in weights.items()}, file)
    models = [ours("llama"), ours("llama")]
    for model, folder in zip(models, (published["llama"], tmp_path), strict=True):
        load_pretrained(model, folder)
    for own, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(own, other)


def test_tensors_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(ours("llama"), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    with caplog.at_level("INFO", "lightning_recipes"):
        load_pretrained(ours("llama"), tmp_path)
    assert f"Not read from {tmp_path}: model.layers.1.self_attn.rotary_emb.inv_freq" in caplog.text


def test_missing_unknown_and_misshapen_tensors_are_rejected(tmp_path: Path) -> None:
    publish(ours("gpt2"), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = {name: value.clone() for name, value in load_file(file).items()}
    name = "transformer.h.0.ln_1.weight"
    save_file({key: value for key, value in whole.items() if key != name} | {"x": whole[name]}, file)
    with pytest.raises(ValueError, match=rf"missing: {name}; unknown: x; type model.pretrained=<folder whose"):
        load_pretrained(ours("gpt2"), tmp_path)
    save_file(whole | {name: torch.ones(31)}, file)
    shapes = rf"={tmp_path}: its {name} has the shape \(31,\), and its config.json describes \(32,\)"
    with pytest.raises(ValueError, match=shapes):
        load_pretrained(ours("gpt2"), tmp_path)
    for values in (torch.ones(()), torch.ones(32, dtype=torch.int8), torch.ones(32).to(torch.float8_e4m3fn)):
        save_file(whole | {name: values}, file)
        with pytest.raises(ConfigError, match=r"has the shape \(\)|it is quantized, and its scales would be lost"):
            load_pretrained(ours("gpt2"), tmp_path)


def test_a_model_without_a_published_format_is_rejected(tmp_path: Path) -> None:
    model = ResNet18(num_classes=2, in_channels=1, small_images=True)
    with pytest.raises(ValueError, match="ResNet18: no published format is known"):
        export_pretrained(model, tmp_path)
