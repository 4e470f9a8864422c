"""A project of one's own: a folder with `conf/` and `src/`, in which the commands know its options and its code.

    my_project/
      conf/recipe/first.yaml   options, in the groups of this project's conf/
      src/my_project/model.py  what they name: `_target_: my_project.model.Classifier`

`open_project` finds one in the working folder; `write_project` makes one. Neither imports its code.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.config.trust import CONF, SEARCH_PATH
from recipes.errors import INSTALLED, PROJECT_VARIABLE, ConfigError, type_command
from recipes.files import describe, filling, write_atomically

OPTIONS, CODE = "conf", "src"
NEW = "new"  # the word that writes one
_TEMPLATE = Path(__file__).parent / "template"
_OF_CLONE = "lightning_recipes/one_name.py"  # a file that a clone of this project has, and no project of one's own
_NAME = "my_project"  # of its package, in the paths and texts of the template


def open_project(typed: Sequence[str]) -> list[str]:
    """Return the override that adds the options of a project in the working folder, and let its code be imported.

    Its `conf/` has a group of this project's, which tells it from a folder of somebody else's. A typed search path
    replaces it. A clone of this project is none: it has the same options, and is run by its own train.py. Its `src/`
    stays on the import path of this process and of those that it starts.

    Args:
        typed: Overrides of this command line.

    Returns:
        One override or none, to stand before the typed ones.
    """
    options = Path(OPTIONS)
    if not options.is_dir() or options.resolve() == CONF.resolve():
        return []
    if not any((CONF / group.name).is_dir() for group in options.iterdir() if group.is_dir()):
        return []
    if Path(_OF_CLONE).is_file():
        print(
            f"{INSTALLED} runs what is installed in {CONF.parent}, and reads nothing of this clone\n"
            "type: python train.py, which runs the clone",
            file=sys.stderr,
        )
        return []
    code = Path(CODE)
    if code.is_dir() and (place := str(code.resolve())) not in sys.path:
        sys.path.insert(1, place)  # after the folder of the script, as with PYTHONPATH
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([place, others] if others else [place])
        os.environ[PROJECT_VARIABLE] = place
    if any(text.lstrip("+").startswith(f"{SEARCH_PATH}=") for text in typed):
        return []
    return [f"{SEARCH_PATH}=[{OPTIONS}]"]


def write_project(words: Sequence[str]) -> Path:
    """Write a small project that trains, with a model, data, a recipe, a test and a CI file, to a new folder.

    Args:
        words: What was typed after `new`: the folder.

    Returns:
        The folder.

    Raises:
        ConfigError: There is no one folder, it is not empty or cannot be written to, or its name is none of a
            Python package.
    """
    typed = " ".join([NEW, *words])
    if len(words) != 1 or words[0].startswith("-") or "=" in words[0]:
        raise ConfigError(typed, "it takes a folder, and nothing else", type_command(f"{NEW} <folder>"))
    folder = Path(os.path.abspath(os.path.expanduser(words[0])))
    name = folder.name.lower().replace("-", "_").replace(" ", "_")
    again = type_command(f"{NEW} <another folder>")
    if not name.isidentifier() or not name.isascii():
        raise ConfigError(typed, f"{name} cannot be the name of its Python package", again)
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(typed, f"{name} is the name of another Python package, which would be imported", again)
    if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= {".git"}):
        raise ConfigError(typed, f"{folder} is there, and not empty", again)
    try:
        with filling(folder) as unfinished:
            for source in sorted(path for path in _TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"):
                target = unfinished / str(source.relative_to(_TEMPLATE)).replace(_NAME, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, source.read_text(encoding="utf-8").replace(_NAME, name))
    except OSError as error:
        raise ConfigError(typed, f"{folder} cannot be made: {describe(error)}", again) from error
    return folder
