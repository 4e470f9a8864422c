"""What is passed to the functions of Python: overrides as people write them there, and the folder of a run.

A list of overrides, one that is still quoted for a shell, and a pasted command are taken as they are meant. A class or
an object cannot be: a config names a class by the module that ranks and a later `load` import it from.
"""

import builtins
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.errors import INSTALLED, ConfigError
from recipes.run_folder import CHECKPOINTS, CONFIG_FILE, find_run_folder

WEIGHTS = ("trained", "best", "ema")
_PROGRAM = re.compile(rf"!?\s*(\S*python[\d.]*|\{{sys\.executable\}}|{INSTALLED})\s")
_SHOWN_CLASS = re.compile(r"<class '([\w.]+)'>")  # of an f-string
_NAMED_CLASS = re.compile(r"_target_['\"]?\s*[:=]\s*['\"]?(?:__main__\.)?([A-Za-z_]\w*)\s*['\"]?(?=[,}]|$)")
_OF_PLAN = ("hardware", "interconnect", "expect_mfu")
_MOST_RUNS = 3
# base class of Lightning -> what trains a class of one's own
_OF_LIGHTNING = {
    "LightningModule": '"task=lightning", "task.module._target_={}"',
    "LightningDataModule": '"data=lightning", "data.module._target_={}"',
}


def read_overrides(call: str, arguments: tuple[object, ...], named: Mapping[str, object]) -> list[str]:
    """Return the overrides that a call was given.

    Args:
        call: Name of the function, for errors.
        arguments: Its arguments: texts, or lists of them.
        named: Its keyword arguments, of which there are none.

    Raises:
        ConfigError: One of them is no override and cannot be meant as one.
    """
    words: list[str] = []
    for argument in arguments:
        for text in argument if isinstance(argument, list | tuple) else [argument]:
            if not isinstance(text, str):
                raise _answer_object(call, text)
            words += _unquote(text)
    for word in words:
        if (found := _find_class(word)) is not None:
            raise _answer_class(word, found, word.partition("=")[0].partition(".")[0].lstrip("+"))
    for name, value in named.items():
        if not isinstance(value, str | int | float):
            raise _answer_object(call, value)
        key = f"plan.{name}" if call == "plan" and name in _OF_PLAN else name
        reason = "a setting is a text, as on the command line"
        raise ConfigError(f"{call}({name}={value!r})", reason, f"{call}({json.dumps(f'{key}={value}')})")
    return words


def _unquote(text: str) -> list[str]:
    """Return the overrides in a text: without a shell's quotation marks, and of a whole command its words."""
    if _PROGRAM.match(text):
        words = shlex.split(text.lstrip("! "))[1:]
        named = next((place for place, word in enumerate(words) if word.endswith("train.py")), -1)
        return words[2:] if words[:2] == ["-m", "lightning_recipes"] else words[named + 1 :]
    is_quoted = len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]
    return [text[1:-1] if is_quoted else text]


def _find_class(word: str) -> str | None:
    """Return the dotted path of the class of a cell, or of one that an f-string shows, in an override."""
    if shown := _SHOWN_CLASS.search(word):
        return shown[1]
    named = _NAMED_CLASS.search(word)
    is_of_cell = named is not None and isinstance(vars(sys.modules["__main__"]).get(named[1]), type)
    return f"__main__.{named[1]}" if named is not None and (is_of_cell or "__main__." in named[0]) else None


def _answer_object(call: str, value: object) -> ConfigError:
    """Return the mistake for an argument that is no text."""
    of = value if isinstance(value, type) else type(value)
    if of.__module__ == builtins.__name__:
        shown = repr(value) if len(repr(value)) < 40 else of.__name__
        return ConfigError(f"{call}({shown})", "an override is a text, key=value", f'{call}("model=gpt2")')
    return _answer_class(f"{call}({of.__name__}…)", f"{of.__module__}.{of.__qualname__}", "model", of)


def _answer_class(setting: str, path: str, section: str, of: type | None = None) -> ConfigError:
    """Return the mistake for a class or an object of it in the place of its name."""
    module, _, name = path.rpartition(".")
    of = of if of is not None else vars(sys.modules["__main__"]).get(name)
    bases = {base.__name__ for base in getattr(of, "__mro__", ())}
    target = f"{'mine' if module == '__main__' else module}.{name}"
    known = (words for base, words in _OF_LIGHTNING.items() if base in bases)
    words = next(known, '"task.module._target_={}"' if section == "task" else f'"{section}._target_={{}}"').format(
        target
    )
    if module != "__main__":
        return ConfigError(setting, "a config names a class by its module", words)
    reason = "a class of a cell has no file, from which the check reads it and every rank and a later load import it"
    return ConfigError(setting, reason, f"%%writefile mine.py as the first line of its cell, and then {words}")


def find_run(call: str, run: Any) -> Path:
    """Return the path that names a run, or a checkpoint in it.

    Args:
        call: Name of the function, for errors.
        run: A path, or what `read` and `fit` return.

    Raises:
        ConfigError: There is nothing, or no run.
    """
    path = Path(os.path.expanduser(getattr(run, "folder", run)))
    typed = f"{call}({str(path)!r})"
    if path.is_file() and (of_file := find_run_folder(path.parent)) is not None:
        raise ConfigError(typed, f"it is a file of the run in {of_file}", f"{call}({str(of_file)!r})")
    if find_run_folder(path) is None:
        below = [*_list_runs(path)] if path.is_dir() else []
        if below:
            shown = " or ".join(f"{call}({str(folder)!r})" for folder in below[:_MOST_RUNS])
            number = "a run" if len(below) == 1 else f"{len(below)} runs"
            raise ConfigError(typed, f"there is no run in this folder, but {number} below it", shown)
        if not path.exists():
            others = " or ".join(f"{call}({str(folder)!r})" for folder in [*_list_runs(Path("logs"))][:_MOST_RUNS])
            raise ConfigError(typed, "there is no such folder", others or f"{call}(<a run folder>)")
    return path


def _list_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders below a folder, the newest first."""
    files = [file for pattern in ("*", "*/*") for file in folder.glob(f"{pattern}/{CONFIG_FILE}")]
    yield from (file.parent for file in sorted(files, key=lambda file: -file.stat().st_mtime))


def find_best(path: Path) -> Path:
    """Return the best checkpoint of a run.

    Raises:
        ConfigError: It has none.
    """
    folder = find_run_folder(path) or path
    if not (best := folder / CHECKPOINTS / "best").exists():
        reason = f"{folder} has no best checkpoint: checkpoint.keep_best=1 keeps one, of steps both saved and evaluated"
        raise ConfigError('weights="best"', reason, 'weights="trained"')
    return best


def check_weights(weights: object) -> None:
    """Check the name of the weights to load.

    Raises:
        ConfigError: There are none of that name.
    """
    if weights not in WEIGHTS:
        near = difflib.get_close_matches(str(weights), WEIGHTS, n=1) or ["trained"]
        reason = "there are trained, best (of the best checkpoint) and ema (the average of a run with ema_decay)"
        raise ConfigError(f"weights={weights!r}", reason, f'weights="{near[0]}"')
