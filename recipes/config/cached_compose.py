"""Hydra composition with per-process caches of parsed files and of the result for a set of options."""

import contextlib
import functools
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import Overrides
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import InputDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from recipes.config.trust import SEARCH_PATH, find_own_folders

# option -> what it sets in a group that is composed after its own, which a file cannot override (Hydra 1.3)
_IMPLIED = {"task=lightning": "model=of_module"}


def compose_overrides(overrides: Sequence[str], folder: Path, name: str | None) -> DictConfig:
    """Compose as `hydra.compose` does: the chosen options first, then the values in the order typed.

    Args:
        overrides: Group options and values.
        folder: Folder of the YAML files.
        name: Primary config, without its suffix; None composes only Hydra's own section.

    Returns:
        The unresolved config with Hydra's own node; the caller may change it.

    Raises:
        hydra.errors.HydraException: A group, option or key does not exist.
    """
    parsed: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
    options, values = _split(parsed, folder, name)
    options += [implied for option, implied in _IMPLIED.items() if option in options and not _chooses(options, implied)]
    node = compose_options(options, folder, name)
    if not values:
        return node
    try:
        ConfigLoaderImpl._apply_overrides_to_config(values, node)
    except (AssertionError, AttributeError) as error:  # raised by OmegaConf for settings of a section that is null
        if isinstance(error, HydraException | OmegaConfBaseException):
            raise
        keys = " ".join(override.key_or_group for override in values)
        raise ConfigCompositionException(f"a section in {keys} is null and takes no settings") from None
    task_overrides = [override for override in parsed if not override.is_hydra_override()]
    node.hydra.overrides.task = [override.input_line for override in task_overrides]
    node.hydra.overrides.hydra = [override.input_line for override in parsed if override.is_hydra_override()]
    node.hydra.job.override_dirname = get_overrides_dirname(
        overrides=task_overrides, **node.hydra.job.config.override_dirname
    )
    return node


def _chooses(options: Sequence[str], option: str) -> bool:
    """Return whether one of the options is of the same group as another."""
    return any(one.partition("=")[0] == option.partition("=")[0] for one in options)


def select_options(overrides: Sequence[str], folder: Path, name: str | None) -> list[str]:
    """Return the overrides that select group options, and so the files to read; all others set values."""
    options, _ = _split(OverridesParser.create().parse_overrides(list(overrides)), folder, name)
    return options


def compose_options(options: Sequence[str], folder: Path, name: str | None) -> DictConfig:
    """Compose the given group options without any values.

    Reading and merging some fifty YAML files takes nine tenths of a composition. The jobs of a sweep, and the attempts
    to explain a wrong command line, differ in values and rarely in options: the result is cached until a YAML file in
    the folder, or in those of the search path, changes.

    Raises:
        hydra.errors.HydraException: A group or option does not exist.
    """
    folder = folder.resolve()
    stamps = tuple(map(_stamp, [folder, *find_own_folders(options)]))
    # Hydra records the working directory in the composed config
    node: DictConfig = pickle.loads(_compose_cached(tuple(options), folder, name, stamps, Path.cwd()))
    return node


@functools.lru_cache(maxsize=32)
def _compose_cached(options: tuple[str, ...], folder: Path, name: str | None, stamp: object, cwd: Path) -> bytes:
    """Return a pickle: each caller unpickles its own copy, in a third of the time of a deep copy."""
    GlobalHydra.instance().clear()
    register_source()
    with initialize_config_dir(str(folder), version_base="1.3"), _maps_of_interpolations_alone():
        try:
            return pickle.dumps(compose(name, list(options), return_hydra_config=True))
        except (AttributeError, TypeError, ValueError) as error:  # raised by Hydra for an option that is not text
            raise ConfigCompositionException(f"not an option: {error}") from error


@contextlib.contextmanager
def _maps_of_interpolations_alone() -> Iterator[None]:
    """Let Hydra map choices for the files whose defaults refer to one, not for every file: a fifth of a composition.

    Hydra 1.3.8 makes a config of all choices at each file that it reads, and looks into it only where the defaults of
    that file have an interpolation.
    """
    make = defaults_list._create_interpolation_map

    def make_if_used(overrides: Overrides, defaults_list: list[InputDefault], self_added: bool) -> DictConfig:
        is_used = any(not default.is_self() and default.is_interpolation() for default in defaults_list)
        return make(overrides, defaults_list, self_added) if is_used else OmegaConf.create()

    defaults_list._create_interpolation_map = make_if_used
    try:
        yield
    finally:
        defaults_list._create_interpolation_map = make


def register_source() -> None:
    """Let Hydra read files as the compositions here do."""
    Plugins.instance()  # registers Hydra's own source of files, if nobody has done that yet
    SourcesRegistry.instance().types[_FilesParsedOnce.scheme()] = _FilesParsedOnce


class _FilesParsedOnce(FileConfigSource):
    """Reparses a file only when it has changed: sets of options differ in few of their fifty files."""

    _parsed: ClassVar[dict[tuple[object, ...], bytes]] = {}

    @override
    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        if not file.is_file():
            return super().load_config(config_path)  # which says so
        stat = file.stat()
        key = (self.provider, str(file), stat.st_mtime_ns, stat.st_size)
        if key not in self._parsed:
            read = super().load_config(config_path)
            with file.open(encoding="utf-8-sig") as text:  # a byte order mark hides the header from Hydra (1.3.8)
                read.header = self._get_header_dict(text.read(512))
            self._parsed[key] = pickle.dumps(read)
        result: ConfigResult = pickle.loads(self._parsed[key])
        return result


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return path, time and size of every YAML file that composition may read; about 2 ms."""
    paths = [path for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}.yaml")]
    stats = [(str(path), path.stat()) for path in paths]
    return tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats)


def _split(parsed: Sequence[Override], folder: Path, name: str | None) -> tuple[list[str], list[Override]]:
    folders = [folder, *find_own_folders([str(override.input_line) for override in parsed])]
    values = [override for override in parsed if _is_value(override, folders, name)]
    return [str(override.input_line) for override in parsed if override not in values], values


def _is_value(override: Override, folders: Sequence[Path], name: str | None) -> bool:
    """Return whether an override sets a value of the composed config rather than choosing what is composed.

    If in doubt, return False, which is slower but never wrong: Hydra then decides. Sweeps are also left to Hydra, which
    rejects them.
    """
    key = override.key_or_group
    may_be_group = "/" in key or override.package is not None or key == "hydra"
    if override.is_sweep_override() or may_be_group or key == SEARCH_PATH:
        return False
    primary = folders[0] / f"{name}.yaml"
    if "." not in key and primary.is_file() and _names_folders(primary, primary.stat().st_mtime_ns):
        return False  # may be a group of another folder
    return not any((folder / key).is_dir() for folder in folders) or isinstance(override.value(), dict)


@functools.cache
def _names_folders(primary: Path, modified_ns: int) -> bool:
    """Return whether a primary config has a search path of its own; if it cannot be read, Hydra says so."""
    with contextlib.suppress(yaml.YAMLError, OSError):
        node = yaml.safe_load(primary.read_text(encoding="utf-8-sig"))
        section = node.get("hydra") if isinstance(node, dict) else None
        return isinstance(section, dict) and "searchpath" in section
    return True
