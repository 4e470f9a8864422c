"""Every module has one name in a process: a class of one copy would be none of the other."""

import importlib
import sys
from types import ModuleType

import pytest

import callbacks.stop_at_nan
import lightning_recipes
import recipes.errors
from lightning_recipes.one_name import ROOT, install


def test_a_module_of_the_package_is_the_module_of_configs() -> None:
    inner = importlib.import_module("lightning_recipes.recipes.errors")
    assert inner is recipes.errors
    assert inner.__name__ == inner.__spec__.name == "recipes.errors"
    assert not hasattr(inner, "__path__"), "it is no package, whose submodules would be looked for"
    assert importlib.import_module("lightning_recipes.callbacks").StopAtNan is callbacks.stop_at_nan.StopAtNan


def test_a_module_that_does_not_exist_is_missing_under_the_name_that_was_asked_for() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("lightning_recipes.recipes.nothing")
    assert caught.value.name == "lightning_recipes.recipes.nothing"


def test_installing_it_again_adds_no_second_finder() -> None:
    before = list(sys.meta_path)
    install()
    assert sys.meta_path == before


def test_another_package_named_recipes_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("recipes")
    other.__file__ = "/home/me/recipes/__init__.py"
    monkeypatch.setitem(sys.modules, "recipes", other)
    monkeypatch.delitem(sys.modules, "lightning_recipes.recipes", raising=False)
    monkeypatch.delattr(lightning_recipes, "recipes", raising=False)
    with pytest.raises(ImportError, match="another package named recipes .* from /home/me/recipes/__init__.py"):
        importlib.import_module("lightning_recipes.recipes")


def test_the_folder_of_this_project_is_the_root() -> None:
    assert (ROOT / "recipes" / "build.py").is_file()
    assert (ROOT / "conf" / "config.yaml").is_file()


def test_the_names_of_the_interface_are_listed_and_others_are_missing() -> None:
    assert {"compose", "load", "plan", "read"} <= set(dir(lightning_recipes))
    assert all(getattr(lightning_recipes, name) for name in lightning_recipes.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'fit'"):
        lightning_recipes.fit  # noqa: B018
