"""The package in which Hydra looks for plugins: ours enter it in code, so that there is none to install."""

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
PLUGIN_NAME = "recipes"  # of our launcher, for hydra/launcher=
PACKAGE = f"{_ROOT}.lightning_recipes"


def register_plugin(
    plugin: type[Plugin], *, group: str | None = None, name: str | None = None
) -> None:
    """Make a plugin known, and where it is an option of one of Hydra's groups, its name. Repeatable."""
    with contextlib.suppress(ModuleNotFoundError):  # there are no others
        import_module(_ROOT)
    if _ROOT not in sys.modules:
        sys.modules[_ROOT] = ModuleType(_ROOT)
    home = sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    sys.modules[_ROOT].__dict__[PACKAGE.rpartition(".")[2]] = home
    plugin.__module__ = PACKAGE
    setattr(home, plugin.__name__, plugin)
    Plugins.instance().register(plugin)
    if group is not None and name is not None:
        node = {"_target_": f"{PACKAGE}.{plugin.__name__}"}
        ConfigStore.instance().store(group=group, name=name, node=node, provider=PACKAGE)


def register(
    config_folder: Path, config_name: str, *, keys: Sequence[str], command: Sequence[str]
) -> None:
    """Make the launcher and the sweeper known to Hydra, and what they need to know. Repeatable."""
    MULTIRUN.config_folder, MULTIRUN.config_name = config_folder, config_name
    MULTIRUN.keys, MULTIRUN.command = keys, command
    MULTIRUN.exit_code = 0
    from recipes.sweep.hydra_launcher import SubprocessLauncher
    from recipes.sweep.optuna_sweeper import OptunaSweeper

    register_plugin(SubprocessLauncher, group="hydra/launcher", name=PLUGIN_NAME)
    register_plugin(OptunaSweeper)
