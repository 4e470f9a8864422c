"""What a constructor or a file system rejects is a mistake about the setting, not a crash."""

from functools import partial
from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from support import composed_config

from recipes.config import compose_and_check
from recipes.config.instantiate import make
from recipes.entry.run import _find_mistake
from recipes.errors import ConfigError


def test_a_value_that_a_constructor_rejects_is_a_mistake_of_its_section() -> None:
    composed, _ = compose_and_check(["callbacks.sample_text.num_tokens=8"])
    assert composed is not None
    node = composed_config()["callbacks"]["sample_text"] | {"every_n_steps": 0}
    with pytest.raises(InstantiationException) as raised:
        make(node)
    mistake = _find_mistake(raised.value, composed)
    assert mistake is not None
    assert mistake.setting == "callbacks.sample_text.every_n_steps=0"
    assert mistake.fix == "callbacks.sample_text.every_n_steps=null"


def test_an_argument_that_a_constructor_names_is_the_setting() -> None:
    composed, _ = compose_and_check(["callbacks=[generation_eval]", "callbacks.generation_eval.answer_regex=("])
    assert composed is not None
    with pytest.raises(InstantiationException) as raised:
        make(composed.config["callbacks"]["generation_eval"])
    mistake = _find_mistake(raised.value, composed)
    assert mistake is not None
    assert mistake.setting == "callbacks.generation_eval.answer_regex=("
    assert mistake.fix == "callbacks.generation_eval.answer_regex=null"


def test_a_path_of_a_mode_that_cannot_be_written_is_a_mistake() -> None:
    composed, _ = compose_and_check(["mode=report", "mode.runs=[x]", "mode.path=/proc/nope/x.html"])
    assert composed is not None
    error = OSError(13, "Permission denied", "/proc/nope/.x.html.tmp")
    assert _find_mistake(OSError(13, "Permission denied", "/elsewhere/x"), composed) is None
    mistake = _find_mistake(OSError(13, "Permission denied", "/proc/nope"), composed)
    assert mistake is not None
    assert str(mistake) == (
        "mode.path=/proc/nope/x.html: it cannot be written to: Permission denied; type mode.path=<another path>"
    )
    assert _find_mistake(error, composed) is not None, "a temporary file beside it"


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_package_that_a_file_of_ones_own_imports_is_named_not_that_file(
    is_deferred: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needing_others.py").write_text("import an_absent_package.part\n\nclass Net: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = {"_target_": "needing_others.Net"}
    outer = {"_target_": "recipes.data.own_datamodule.OwnDataModule", "module": own}
    construct = make(outer).construct if is_deferred else partial(make, own)
    with pytest.raises(ConfigError) as raised:
        construct()
    assert str(raised.value) == (
        "_target_=needing_others.Net: importing it raises ModuleNotFoundError: No module named 'an_absent_package';"
        " type pip install an-absent-package, or PYTHONPATH=<the folder with an_absent_package> before the command"
        " if it is code of your own"
    )


def test_a_package_that_is_not_there_is_installed_or_found(tmp_path: Path) -> None:
    _, mistakes = compose_and_check(["callbacks=[]", "+callbacks.x._target_=absent_package.Callback"])
    assert [mistake.fix for mistake in mistakes] == [
        "PYTHONPATH=<the folder with absent_package> before the command if it is code of your own, or pip install"
        " absent-package if it is published"
    ]
