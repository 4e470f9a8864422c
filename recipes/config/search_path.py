"""Use options from outside this repository: a typed `hydra.searchpath` adds folders with the groups of conf/.

A run records its search path, but only a typed one is searched, as it decides which code runs.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from typing_extensions import override

from recipes.config.overrides import make_override
from recipes.config.trust import CONF, SEARCH_PATH, find_own_folders, parse_values


def select_search_path(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that set the search path."""
    candidates = [text for text in overrides if SEARCH_PATH in text]  # parsing takes 1 ms each
    return [str(each.input_line) for each in parse_values(candidates) if each.key_or_group == SEARCH_PATH]


def expand_home(override: str) -> str:
    """Return an override of the search path with the home folder for `~`, which Hydra leaves alone."""
    parsed = [each.value() for each in parse_values([override]) if each.key_or_group == SEARCH_PATH]
    places = parsed[0] if parsed else None
    if not isinstance(places, list):
        return override
    expanded = [_expand(str(place)) for place in places]
    return make_override(override.partition("=")[0], expanded) if expanded != places else override


def _expand(place: str) -> str:
    protocol, slashes, path = place.rpartition("://")
    return f"{protocol}{slashes}{os.path.expanduser(path)}"


def find_config_folders(typed: Sequence[str]) -> list[Path]:
    """Return conf/ and the folders of the typed search path that exist."""
    return [CONF, *(folder for folder in find_own_folders(typed) if folder.is_dir())]


class OwnFolders(SearchPathPlugin):
    """Adds the typed folders to those whose options Hydra lists: in `--help`, and for a `glob` of a sweep.

    Hydra searches `hydra.searchpath` only where it composes (1.3.8).
    """

    typed: ClassVar[Sequence[str]] = ()

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in find_own_folders(self.typed):
            search_path.append(SEARCH_PATH, f"file://{folder}")


@contextlib.contextmanager
def listing_own_options(typed: Sequence[str]) -> Iterator[None]:
    """Let Hydra list the options of the typed search path within this block."""
    Plugins.instance().register(OwnFolders)  # has an effect once
    OwnFolders.typed = typed
    try:
        yield
    finally:
        OwnFolders.typed = ()
