"""A reward function in a Python file of the user's, which runs with the rights of whoever typed its path."""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from recipes.errors import ConfigError


class OwnFunction:
    """Calls a function of the user's as `function(prompts=…, completions=…, references=…, rows=…)`.

    Args:
        path: The file and the name of the function in it, `file.py:function`; relative to the folder of the command.
        weight: Factor in the sum of all rewards.
    """

    def __init__(self, *, path: str, weight: Annotated[float, ">= -1000, <= 1000"]) -> None:
        self.weight = weight
        self._path = path
        self._function: Callable[..., Sequence[float]] | None = None

    def load(self) -> None:
        """Execute the file.

        Raises:
            ConfigError: There is no such file or function, or the file raises an exception.
        """
        self._function = load_function(self._path)

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> Sequence[float]:
        """Return what the function returns; `Rewards` checks it."""
        assert self._function is not None, "load() has been called"
        return self._function(prompts=prompts, completions=completions, references=references, rows=rows)


def split_path(path: str) -> tuple[Path, str]:
    """Return the file and the function that `file.py:function` names; an empty name without a colon."""
    file, colon, name = path.rpartition(":")
    return Path(os.path.expanduser(file if colon else path)), name if colon else ""


def load_function(path: str) -> Callable[..., Any]:
    """Execute a Python file and return a function in it.

    Raises:
        ConfigError: There is no such file or function, or the file raises an exception.
    """
    file, name = split_path(path)
    setting, again = f"reward.mine.path={path}", "the same command once it is corrected"
    module_name = f"_reward_of_{file.stem}_{abs(hash(str(file.resolve())))}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(setting, "there is no such Python file", "reward.mine.path=<file.py>:<function>")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(setting, f"the file raises {what}", again) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(setting, f"{file} has no function {name!r}", f"reward.mine.path={file}:<function>")
    found: Callable[..., Any] = function
    return found
