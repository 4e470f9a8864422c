"""Sizes of a published model that is not a local folder: of the hub's cache while the hub cannot be reached."""

import json
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from recipes.config import compose_and_check, published
from recipes.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, on a machine that knows no host and no proxy."""

    def find_no_host(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", find_no_host)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    published._find_on_hub.cache_clear()
    return tmp_path


def test_a_machine_that_is_offline_is_told_so_without_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a request, which the hub's library would repeat for half a minute")

    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", refuse)
    with pytest.raises(ConfigError, match=r"huggingface\.co is not found: is this machine offline\?"):
        published.read_size("somebody/model", "vocab_size")
    assert published.published_size("somebody/model", "vocab_size") is None


def test_what_was_downloaded_once_is_read_offline(cache: Path) -> None:
    revision = "0" * 40
    folder = cache / "models--somebody--model"
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "snapshots" / revision / "config.json").write_text(json.dumps({"vocab_size": 49152}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    assert published.read_size("somebody/model", "vocab_size") == 49152


def test_behind_a_proxy_the_hub_is_asked_although_its_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def download(*_: Any, local_files_only: bool) -> str:
        asked.append(local_files_only)
        raise OSError("404: no such repository\nmore lines")

    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ConfigError, match="the hub says: 404: no such repository; type"):
        published.read_size("somebody/model", "vocab_size")
    assert asked == [False]


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, "{", '{"vocab_size": true}', '{"text_config": 3}'])
def test_a_config_without_a_size_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^model\.name={tmp_path}: .*config\.json "):
        published.read_size(str(tmp_path), "vocab_size")


def test_a_home_that_does_not_exist_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="model.name=~nobody/x: there is no such folder"):
        published.read_size("~nobody/x", "vocab_size")


@pytest.mark.parametrize("holds", ["", "adapter_config.json", "config.json"])
def test_a_folder_without_a_readable_config_is_the_only_mistake(holds: str, tmp_path: Path) -> None:
    if holds:
        (tmp_path / holds).write_text("// my model\n{}")
    typed = ["data=random_tokens", "tokenizer=none", "model=huggingface", f"model.name={tmp_path}"]
    _, mistakes = compose_and_check(typed)
    assert [mistake.setting for mistake in mistakes] == [f"model.name={tmp_path}"]
    _, mistakes = compose_and_check([*typed, "data.seq_len=x"])
    assert [mistake.setting for mistake in mistakes] == ["data.seq_len=x", f"model.name={tmp_path}"]


def test_the_token_of_images_is_that_of_the_tokenizer_on_the_hub_as_of_one_in_a_folder(cache: Path) -> None:
    folder = cache / "models--a--words" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (cache / "models--a--words" / "refs").mkdir()
    (cache / "models--a--words" / "refs" / "main").write_text("abc")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 320}))
    with pytest.raises(ConfigError, match=r"model\.language=a/words: .*not downloaded yet"):
        published.read_llava_size(None, None, "a/words", "image_token_id")  # not one of the model's, by chance
    published._find_on_hub.cache_clear()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 299}}, "added_tokens": []}))
    for language in ("a/words", str(folder)):
        assert published.read_llava_size(None, None, language, "image_token_id") == 300
        assert published.read_llava_size(None, None, language, "vocab_size") == 320
