"""Every conf/model/*.yaml builds on the meta device, with exactly the published number of parameters."""

import importlib
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

FOLDER = Path(__file__).parents[3] / "conf" / "model"
NUM_PARAMETERS = {  # without vocabulary padding
    "gpt2_nano": 1_752_768,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama_nano": 1_574_208,
    "llama_160m": 162_417_408,
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "deepseek_nano": 4_877_632,
    "deepseek_v3": 671_026_404_352,  # and 14,848 biases of experts, which are no parameters
    "mixtral_nano": 4_233_024,
    "mixtral_8x7b": 46_702_792_704,
    "resnet18": 11_172_810,
    "resnet50": 25_557_032,
    "timm": 25_557_032,  # its resnet50
    # the ViT-S/16 of timm without its head, 6 blocks of GPT-2 with their embeddings and norm, projections and scale
    "dual_encoder": 21_665_664 + (50_304 + 77) * 384 + 6 * 1_774_464 + 768 + 2 * 384 * 256 + 1,
    "mlp": 74_242,  # of 30 inputs and 2 classes
}
OF_NUMBERS: dict[str, dict[str, object]] = {"resnet18": {}, "resnet50": {}, "timm": {}, "dual_encoder": {}}
OF_NUMBERS["mlp"] = {"num_inputs": 30, "num_classes": 2}


def build(option: str, **changes: object) -> nn.Module:
    node = yaml.safe_load((FOLDER / f"{option}.yaml").read_text())
    node.pop("defaults", None)
    module, name = node.pop("_target_").rsplit(".", 1)  # the right one: tests/test_conf.py
    with torch.device("meta"):
        model: nn.Module = getattr(importlib.import_module(module), name)(**(node | changes))
    return model


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_option_is_counted_here() -> None:
    by_name = {"huggingface", "clip", "llava", "of_module"}  # as many as the named model has, or the module constructs
    assert {file.stem for file in FOLDER.glob("*.yaml")} - by_name == set(NUM_PARAMETERS)


@pytest.mark.parametrize("option", NUM_PARAMETERS)
def test_number_of_parameters(option: str) -> None:
    model = build(option, **OF_NUMBERS.get(option, {"vocab_pad_multiple": 1}))
    assert count(model) == NUM_PARAMETERS[option]
    everything = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in everything)  # llama_8b: 32 GB that nobody takes


def test_padding_gpt2_to_50304_tokens_adds_47_rows() -> None:
    assert count(build("gpt2")) - NUM_PARAMETERS["gpt2"] == 47 * 768


def test_resnet18_for_a_thousand_classes_of_large_images_has_the_published_size() -> None:
    model = build("resnet18", num_classes=1000, in_channels=3, small_images=False)
    assert count(model) == 11_689_512
