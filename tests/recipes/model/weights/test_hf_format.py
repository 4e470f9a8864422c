"""Published weights are compared with the model before they are loaded: every difference is listed with its fix."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.model.resnet import ResNet18
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
    with pytest.raises(ValueError, match="type another model=…"):
        load_pretrained(ours("llama"), tmp_path)


def test_missing_unknown_and_misshapen_tensors_are_rejected(tmp_path: Path) -> None:
    publish(ours("gpt2"), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = {name: value.clone() for name, value in load_file(file).items()}
    name = "transformer.h.0.ln_1.weight"
    save_file({key: value for key, value in whole.items() if key != name} | {"x": whole[name]}, file)
    with pytest.raises(ValueError, match=rf"missing: {name}\n  unknown: transformer\.x"):
        load_pretrained(ours("gpt2"), tmp_path)
    save_file(whole | {name: torch.ones(31)}, file)
    with pytest.raises(ValueError, match=r"\(31,\) cannot fill blocks\.0\.attention_norm\.weight"):
        load_pretrained(ours("gpt2"), tmp_path)


def test_a_model_without_a_published_format_is_rejected(tmp_path: Path) -> None:
    model = ResNet18(num_classes=2, in_channels=1, small_images=True)
    with pytest.raises(ValueError, match="model=ResNet18: no published format is known"):
        export_pretrained(model, tmp_path)
