"""Commands of a run as a shell needs them: where their code is, and which classes of a run folder have to be typed."""

import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from recipes.config.check.origin import list_untrusted
from recipes.config.overrides import for_shell, make_override, unescape_interpolations
from recipes.config.search_path import select_search_path
from recipes.config.trust import find_own_folders, read_yaml_files
from recipes.errors import PROJECT_VARIABLE, in_notebook, type_command, type_words
from recipes.run_folder import CONFIG_FILE, read_config
from recipes.runtime.own_code import is_own

_ROOT = Path(__file__).parents[2]  # of this project, which every command finds
_PACKAGE = re.compile(r"_target_['\"]?\s*[:=]\s*['\"]?([A-Za-z_]\w*)\.")  # in an override or in YAML


def resume_command(folder: Path, overrides: Sequence[str]) -> str:
    """Return the command that resumes a run; in a notebook, the call.

    It has what may not come from a folder: the search path, and the classes that no option names.

    Args:
        folder: Run folder.
        overrides: Overrides that the run was started with.
    """
    typed = [*select_search_path(overrides), make_override("resume", str(folder))]
    typed += list_classes(folder, typed)
    if in_notebook():
        return f"lr.compose({', '.join(map(json.dumps, typed))}).fit()"
    return repeat_command(typed)


def list_classes(folder: Path, typed: Sequence[str]) -> list[str]:
    """Return the overrides that name the classes of a run which its folder alone may not choose.

    Args:
        folder: Run folder.
        typed: Other overrides of the command line.
    """
    file = folder / CONFIG_FILE
    return list_untrusted(unescape_interpolations(read_config(folder)), typed, file) if file.is_file() else []


def repeat_command(overrides: Sequence[str]) -> str:
    """Return the command with these overrides, and with those folders of PYTHONPATH that hold packages it names.

    Args:
        overrides: Overrides, as the program gets them.
    """
    return f"{start_program(overrides)} {type_words(' '.join(map(for_shell, overrides)))}"


def start_program(overrides: Sequence[str]) -> str:
    """Return the command without its overrides, such as `PYTHONPATH=my_code python train.py`.

    Args:
        overrides: Overrides, as the program gets them.
    """
    command = type_command("").rstrip()
    folders = os.pathsep.join(_find_folders_of_code(overrides))
    if not folders:
        return command
    mark = "!" if command.startswith("!") else ""  # of a cell
    return f"{mark}PYTHONPATH={shlex.quote(folders)} {command.removeprefix(mark)}"


def _find_folders_of_code(overrides: Sequence[str]) -> list[str]:
    """Return PYTHONPATH's folders as they were typed, if one of them holds a package that overrides or options name.

    All of them that hold any code, since a class of one folder may import from another.
    """
    typed = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    entries = [*typed]
    if in_notebook():  # whose cells say where code is by sys.path; the command finds the working folder itself
        entries += [
            entry for entry in sys.path if entry and is_own(f"{entry}/") and Path(entry).resolve() != Path.cwd()
        ]
    if not entries:
        return []
    files = [text for folder in find_own_folders(overrides) for _, text in read_yaml_files(folder)]
    packages = {name for text in [*overrides, *files] for name in _PACKAGE.findall(text)}
    found = [entry for entry in entries if _is_foreign(entry) and _holds_one_of(entry, packages)]
    return list(dict.fromkeys([*filter(_is_foreign, typed), *found] if found else []))


def _is_foreign(entry: str) -> bool:
    """Return whether a folder of the import path holds code, and that of neither this project nor the one it is in."""
    if Path(entry).resolve() == _ROOT or entry == os.environ.get(PROJECT_VARIABLE):
        return False
    return Path(entry).is_dir() and any(child.is_dir() or child.suffix == ".py" for child in Path(entry).iterdir())


def _holds_one_of(entry: str, packages: Collection[str]) -> bool:
    return any((Path(entry) / name).is_dir() or (Path(entry) / f"{name}.py").is_file() for name in packages)
