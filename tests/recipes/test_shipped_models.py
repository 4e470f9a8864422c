"""Shipped configurations: found by name wherever a model is, and without weights and tokenizer."""

from pathlib import Path

import pytest
from support import composed_config

from recipes.config import compose_and_check
from recipes.config.instantiate import make
from recipes.config.published import read_size
from recipes.foreign_file import missing_published
from recipes.model.transformers_models import load_config
from recipes.model.weights.files import locate
from recipes.shipped_models import SHIPPED, find_model, is_shipped
from recipes.tokenizer.huggingface import HuggingFace
from recipes.transform.published import read_published

TYPED = {
    "clip_nano": ("recipe=clip_scenes",),
    "llama_nano": ("model=huggingface", "model.name=llama_nano", "model.pretrained=null", "tokenizer=bpe"),
}


def test_every_shipped_model_is_tried_here() -> None:
    assert {*TYPED} == {*SHIPPED}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_built_by_name_of_about_a_million_parameters(name: str) -> None:
    model = make(composed_config(*TYPED[name])["model"])
    assert model.name == name
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.5e6


def test_sizes_and_pixels_are_read_of_the_shipped_file() -> None:
    assert read_size("clip_nano", "image_size") == load_config("clip_nano").vision_config.image_size == 32
    published, origin = read_published("clip_nano")
    assert published["size"] == 32
    assert origin == "usual for clip, because there is no preprocessor_config.json in clip_nano"


def test_a_folder_of_that_name_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clip_nano").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_shipped("clip_nano")
    assert find_model("clip_nano") == "clip_nano"
    assert find_model("~/x") == str(Path.home() / "x")


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_of_a_shipped_model_are_one_mistake(name: str) -> None:
    _, [mistake] = compose_and_check((*TYPED[name], f"model.pretrained={name}"))
    reason = f"model.pretrained={name}: it is a configuration that comes without weights"
    assert str(mistake) == f"{reason}; type model.pretrained=null"
    with pytest.raises(ValueError, match=reason):
        locate(name)
    judge = missing_published(name, "reward.model.pretrained")
    assert judge is not None
    assert judge.fix == "reward.model.pretrained=<folder with config.json, or hub id>"


def test_the_tokenizer_of_a_shipped_model_is_another_option() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.name=llama_nano: .* without a tokenizer; type tokenizer=bpe"):
        HuggingFace(name="llama_nano").make(None)  # type: ignore[arg-type]  # it reads no text
