"""The example of every public callback's docstring runs as it stands."""

import doctest
import inspect
import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Callback

import callbacks

PUBLIC = {name: getattr(callbacks, name) for name in callbacks.__all__}
CALLBACKS = [name for name, each in PUBLIC.items() if inspect.isclass(each) and issubclass(each, Callback)]


@pytest.mark.parametrize("name", CALLBACKS)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = getattr(callbacks, name)
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(recurse=False)
    examples = [test for test in finder.find(callback, name, sys.modules[callback.__module__]) if test.examples]
    assert examples, f"{name} has no example in its docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in examples:
        runner.run(example)
    assert runner.failures == 0
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


@pytest.mark.parametrize("name", CALLBACKS)
def test_help_describes_every_argument_in_order(name: str) -> None:
    callback = getattr(callbacks, name)
    text = inspect.getdoc(callback) or ""
    section = re.search(r"^Args:\n((?:    .*\n)+)", text + "\n", flags=re.MULTILINE)
    described = re.findall(r"^    (\w+): \S", section.group(1), flags=re.MULTILINE) if section else []
    assert described == list(inspect.signature(callback).parameters)
