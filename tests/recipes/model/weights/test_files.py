"""A folder of weights is located, checked for completeness and read; missing files are named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recipes.errors import ConfigError
from recipes.model.weights import files as published_weights
from recipes.model.weights.files import locate, open_weights


def test_safetensors_are_preferred_to_pickles_and_read_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with open_weights(tmp_path) as weights:
        assert weights.names() == {"a"}
        assert torch.equal(weights.read("a"), torch.ones(2))


def test_a_pickle_that_runs_code_is_rejected(tmp_path: Path) -> None:
    torch.save({"a": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match="Weights only load failed"), open_weights(tmp_path):
        pass


def test_a_folder_without_config_or_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path
    with (
        pytest.raises(ConfigError, match=r"neither model\.safetensors nor pytorch_model\.bin"),
        open_weights(tmp_path),
    ):
        pass


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"missing: two\.safetensors"), open_weights(tmp_path):
        pass


def test_a_hub_name_offline_and_without_huggingface_hub_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def offline(*arguments: object, **options: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", offline)
        with pytest.raises(ConfigError, match=r"the hub did not give it .*no network.* or null"):
            published_weights.locate("openai-community/gpt2")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[huggingface\]'"):
        published_weights.locate("openai-community/gpt2")
