"""Published tokenizers, from a folder; tests never access the hub."""

import json
import sys

import pytest

from recipes.errors import ConfigError
from recipes.tokenizer.bytes import byte_tokenizer
from recipes.tokenizer.huggingface import HuggingFace

REMEDY = "tokenizer.name=<folder with tokenizer.json>, which works offline, or another hub id"


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer().save(tmp_path)
    return tmp_path


def test_a_folder_gives_the_ids_of_the_library(folder):
    tokenizer = HuggingFace(name=str(folder)).make(None)
    assert tokenizer.encode("né") == [110, 195, 169]
    assert tokenizer.end_of_text == 256


def test_the_end_of_text_token_comes_from_the_settings(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for eos in ("<|endoftext|>", {"content": "<|endoftext|>"}, None):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": eos}))
        assert HuggingFace(name=str(folder)).make(None).end_of_text == 256
    (folder / "tokenizer_config.json").unlink()
    assert HuggingFace(name=str(folder)).make(None).end_of_text == 256


def test_other_settings_are_preserved_when_saved_again(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "hello"}))
    HuggingFace(name=str(folder)).make(None).save(folder / "again")
    saved = json.loads((folder / "again/tokenizer_config.json").read_text())
    assert saved["chat_template"] == "hello"


def refuse(name):
    with pytest.raises(ConfigError) as caught:
        HuggingFace(name=name).make(None)
    return str(caught.value)


def test_folders_without_a_tokenizer_are_rejected(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    empty, missing = tmp_path / "empty", tmp_path / "missing"
    assert refuse(str(empty)) == (f"tokenizer.name={empty}: the folder has no tokenizer.json; type {REMEDY}")
    assert refuse(str(missing)) == (f"tokenizer.name={missing}: there is no such folder; type {REMEDY}")
    (folder / "tokenizer.json").write_text("{}")
    assert "is not a valid tokenizer file" in refuse(str(folder))


def test_a_vocabulary_without_the_end_of_a_document_is_rejected(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "</s>"}))
    assert refuse(str(folder)) == (
        f"tokenizer.name={folder}: its vocabulary has no end-of-text token </s>; type {REMEDY}"
    )


def test_a_missing_hub_library_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refuse("some/model") == (
        "tokenizer.name=some/model: it is not a local folder, and a download from the hub needs huggingface-hub, "
        "which is not installed; type pip install -e '.[huggingface]', "
        "or tokenizer.name=<folder with tokenizer.json>"
    )


def test_an_unreachable_hub_is_an_error_that_names_the_offline_way(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(*_):
        raise OSError("no connection\nand a long story")

    monkeypatch.setattr(hub, "hf_hub_download", offline)
    assert refuse("some/model") == (
        "tokenizer.name=some/model: its tokenizer.json could not be downloaded from the hub (no connection);"
        f" type {REMEDY}"
    )
