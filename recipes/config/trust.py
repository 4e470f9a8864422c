"""Distinguish trusted configs (conf/, the command line) from untrusted ones (a run folder, `--config-path`)."""

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf.resolvers import oc

from recipes.config.overrides import parse_or_quote
from recipes.run_folder import CONFIG_FILE, find_run_folder

CONF = Path(__file__).parents[2] / "conf"
SEARCH_PATH = "hydra.searchpath"
# sections that refer to another one, `evaluator: ${evaluator}` -> that one, where their settings are typed
COPIES = {
    ("mode", "evaluator"): ("evaluator",),
    ("mode", "answers", "rewards", "functions"): ("reward",),
    ("callbacks", "generation_eval", "rewards", "functions"): ("reward",),
    ("mode", "zero_shot"): ("callbacks", "zero_shot"),
    ("task", "rewards", "functions"): ("reward",),
    ("task", "rollout"): ("rollout",),
    ("data", "transform"): ("transform",),
}
# classes that execute a Python file -> the argument that names it
RUNS_FILE = {"recipes.reward.mine.OwnFunction": "path"}
_FILE, _PACKAGE = "file://", "pkg://"
_TYPED_HERE: dict[Path, list[str]] = {}  # run folder, resolved -> what was typed for it in this process
_VARIABLE = re.compile(r"oc\.env:\s*(\w+)")


def find_trusted_folders(typed: Sequence[str]) -> list[Path]:
    """Return the config folders whose files may name any constructor: conf/, and those of a typed `hydra.searchpath`.

    Args:
        typed: Overrides of this command line.
    """
    return [CONF.resolve(), *find_own_folders(typed)]


def find_own_folders(typed: Sequence[str]) -> list[Path]:
    """Return the folders of a typed `hydra.searchpath`, resolved, whether they exist or not.

    Args:
        typed: Overrides of this command line.
    """
    texts = [place for text in typed if SEARCH_PATH in text for place in _read_search_path(text)]
    folders = [
        _find_package(text) if text.startswith(_PACKAGE) else Path(os.path.expanduser(text.removeprefix(_FILE)))
        for text in texts
    ]
    return [folder.resolve() for folder in folders if folder is not None]


@functools.cache
def _read_search_path(text: str) -> tuple[str, ...]:
    """Return the places that an override adds to the search path; every check asks, and parsing takes 7 ms."""
    paths = [override.value() for override in parse_values([text]) if override.key_or_group == SEARCH_PATH]
    return tuple(str(place) for path in paths if isinstance(path, list) for place in path)


def _find_package(text: str) -> Path | None:
    """Return the folder of `pkg://package.folder` without importing the package; None if it is not installed."""
    package, *below = text.removeprefix(_PACKAGE).replace("/", ".").split(".")
    with contextlib.suppress(ValueError):  # an empty name
        found = importlib.util.find_spec(package)
        for location in (found and found.submodule_search_locations) or ():
            return Path(location, *below)
    return None


def find_resumed_run(typed: Sequence[str]) -> Path | None:
    """Return the run folder that `resume=` names, whose frozen config is then the base; else None."""
    for override in reversed(typed):  # of several the last one counts
        key, _, value = override.partition("=")
        if key.lstrip("+") == "resume" and value not in ("null", "auto", ""):
            parsed, _ = parse_or_quote(override)
            named = value if parsed is None or parsed.is_sweep_override() else str(parsed.value())
            return find_run_folder(Path(os.path.expanduser(named)))  # a shell does not expand the ~ in key=~/x
    return None


def remember_typed(folder: Path, typed: Sequence[str]) -> None:
    """Trust what was typed for a run that this process has started, wherever its folder is named again.

    Args:
        folder: Run folder.
        typed: Overrides of the call, without those of a resumed run.
    """
    _TYPED_HERE.setdefault(folder.resolve(), []).extend(typed)


def recall_typed(typed: Sequence[str]) -> list[str]:
    """Return what was typed in this process for the run that `resume=` names; empty if it started elsewhere.

    Args:
        typed: Overrides of this command line.
    """
    resumed = find_resumed_run(typed)
    return [] if resumed is None else list(_TYPED_HERE.get(resumed.resolve(), ()))


def find_origin(config_folder: Path, typed: Sequence[str]) -> Path | None:
    """Return the untrusted folder or file that a config comes from; None if it is trusted.

    Args:
        config_folder: Config folder.
        typed: Overrides of this command line.
    """
    if config_folder.resolve() not in find_trusted_folders(typed):
        return config_folder
    resumed = find_resumed_run(typed)
    return None if resumed is None else resumed / CONFIG_FILE


def read_yaml_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield every YAML file below a folder with its text."""
    for file in sorted(folder.rglob("*.yaml")):
        yield file, file.read_text(encoding="utf-8-sig")


def restrict_variables(typed: Sequence[str]) -> Callable[..., str | None]:
    """Return an `${oc.env:…}` resolver restricted to variables that trusted files or the command line name.

    A resolved config is written to disk, and a logger may upload it: with any other variable, somebody else's config
    could leak this user's secrets.
    """
    texts = [text for folder in find_trusted_folders(typed) for _, text in read_yaml_files(folder)]
    readable: Collection[str] = {name for text in [*texts, *typed] for name in _VARIABLE.findall(text)}

    def read_variable(name: str, *default: Any) -> str | None:
        if name in readable:
            return oc.env(name, *default)
        raise PermissionError(
            f"the environment variable {name} may be a secret: neither conf/ nor this command line names it"
        )

    return read_variable


def parse_values(typed: Sequence[str]) -> list[Override]:
    """Parse the overrides that set a single value or choose an option; errors in them are reported elsewhere."""
    parsed = [override for text in typed if (override := parse_or_quote(text)[0]) is not None]
    return [override for override in parsed if not override.is_delete() and not override.is_sweep_override()]
