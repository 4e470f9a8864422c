"""Register the launcher and the sweeper as Hydra plugins in code, so that no plugin package has to be installed."""

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin

from recipes.sweep.session import MULTIRUN

_ROOT = "hydra_plugins"
PLUGIN_NAME = "recipes"  # the launcher is hydra/launcher=recipes
PACKAGE = f"{_ROOT}.lightning_recipes"


def register_plugin(plugin: type[Plugin], *, group: str | None = None, name: str | None = None) -> None:
    """Register a plugin class, and optionally a config option that selects it. Repeatable.

    Args:
        plugin: The class.
        group: Hydra's config group, such as `hydra/launcher`; None adds no option.
        name: The option's name in that group.
    """
    with contextlib.suppress(ModuleNotFoundError):  # no other plugin is installed
        import_module(_ROOT)
    if _ROOT not in sys.modules:
        sys.modules[_ROOT] = ModuleType(_ROOT)
    package = sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    sys.modules[_ROOT].__dict__[PACKAGE.rpartition(".")[2]] = package
    plugin.__module__ = PACKAGE  # Hydra accepts `_target_`s of plugins only inside hydra_plugins
    setattr(package, plugin.__name__, plugin)
    Plugins.instance().register(plugin)
    if group is not None and name is not None:
        node = {"_target_": f"{PACKAGE}.{plugin.__name__}"}
        ConfigStore.instance().store(group=group, name=name, node=node, provider=PACKAGE)


def register(config_folder: Path, config_name: str, *, keys: Sequence[str], command: Sequence[str]) -> None:
    """Register the launcher and the sweeper, and start a new `MultirunState`. Repeatable.

    Args:
        config_folder: The folder from which jobs are composed.
        config_name: The primary config.
        keys: The keys swept over on the command line.
        command: The full command line, without the program.
    """
    MULTIRUN.config_folder, MULTIRUN.config_name = config_folder, config_name
    MULTIRUN.keys, MULTIRUN.command = keys, command
    MULTIRUN.exit_code = 0
    from recipes.sweep.hydra_launcher import SubprocessLauncher
    from recipes.sweep.optuna_sweeper import OptunaSweeper

    register_plugin(SubprocessLauncher, group="hydra/launcher", name=PLUGIN_NAME)
    register_plugin(OptunaSweeper)
