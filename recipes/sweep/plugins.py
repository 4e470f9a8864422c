"""Register the launcher and the sweeper as Hydra plugins in code, so that no plugin package has to be installed."""

import contextlib
import sys
from importlib import import_module
from types import ModuleType

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin

_ROOT = "hydra_plugins"
PLUGIN_NAME = "recipes"  # the launcher is hydra/launcher=recipes
PACKAGE = f"{_ROOT}.lightning_recipes"


def register() -> None:
    """Register the launcher, as an option of `hydra/launcher`, and the sweeper. Repeatable."""
    from recipes.sweep.hydra_launcher import SubprocessLauncher
    from recipes.sweep.optuna_sweeper import OptunaSweeper

    for plugin in (SubprocessLauncher, OptunaSweeper):
        _register_plugin(plugin)
    node = {"_target_": f"{PACKAGE}.{SubprocessLauncher.__name__}"}
    ConfigStore.instance().store(group="hydra/launcher", name=PLUGIN_NAME, node=node, provider=PACKAGE)


def _register_plugin(plugin: type[Plugin]) -> None:
    with contextlib.suppress(ModuleNotFoundError):  # no other plugin is installed
        import_module(_ROOT)
    if _ROOT not in sys.modules:
        sys.modules[_ROOT] = ModuleType(_ROOT)
    package = sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    sys.modules[_ROOT].__dict__[PACKAGE.rpartition(".")[2]] = package
    plugin.__module__ = PACKAGE  # Hydra accepts `_target_`s of plugins only inside hydra_plugins
    setattr(package, plugin.__name__, plugin)
    Plugins.instance().register(plugin)
