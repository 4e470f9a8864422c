"""A file that was edited since it was imported is imported again, with those that import it."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lightning_recipes.edited import reload_edited, remember_imported
from recipes.errors import ConfigError

LAYERS, NET, HELPER = "edited_layers", "edited_net", "edited_helper"


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{LAYERS}.py").write_text("SIZE = 4\n")
    (tmp_path / f"{NET}.py").write_text(f"from {LAYERS} import SIZE\n\nWIDTH = 2 * SIZE\n")
    (tmp_path / f"{HELPER}.py").write_text("STATE = []\n")
    importlib.import_module(HELPER)
    module = importlib.import_module(NET)
    remember_imported()
    yield module
    for name in (LAYERS, NET, HELPER):
        sys.modules.pop(name, None)


def edit(module: str, text: str) -> None:
    Path(str(sys.modules[module].__file__)).write_text(text)
    importlib.invalidate_caches()


def test_what_is_not_edited_is_left_as_it_is(net: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    reload_edited()
    assert capsys.readouterr().err == ""


def test_a_file_is_imported_again_before_those_that_import_it(
    net: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.modules[HELPER].STATE.append(1)
    edit(LAYERS, "SIZE = 16\n")
    reload_edited()
    assert (net.WIDTH, sys.modules[HELPER].STATE) == (32, [1])
    assert capsys.readouterr().err == f"Edited since it was imported, so imported again: {LAYERS}, {NET}\n"
    reload_edited()
    assert capsys.readouterr().err == ""


def test_what_has_been_imported_again_is_not_edited(net: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    edit(NET, "WIDTH = 100\n")
    importlib.reload(net)
    reload_edited()
    assert (net.WIDTH, capsys.readouterr().err) == (100, "")
    edit(NET, "WIDTH = 1000\n")
    reload_edited()
    assert net.WIDTH == 1000


def test_an_import_before_this_project_is_compared_with_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "edited_early.py").write_text("WIDTH = 1\n")
    early = importlib.import_module("edited_early")
    edit("edited_early", "WIDTH = 1000\n")
    reload_edited()
    assert early.WIDTH == 1000
    del sys.modules["edited_early"]


def test_a_file_that_cannot_be_imported_again_is_a_mistake_until_it_can(net: ModuleType) -> None:
    for text, error in (("1 / 0\n", "ZeroDivisionError"), ("WIDTH = (\n", "SyntaxError")):
        edit(NET, text)
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"{NET}.py: it was edited .* fails: {error}"):
                reload_edited()
    edit(NET, "WIDTH = 7\n")
    reload_edited()
    assert net.WIDTH == 7
