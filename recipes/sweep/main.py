"""Start a sweep: `-m`, or `sweep=<option>` without it."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin

from recipes.config.overrides import for_shell
from recipes.entry.hydra_main import run_through_hydra
from recipes.errors import ConfigError, format_report, type_command
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.world import global_rank, started_by

# sections and settings that a sweep alone reads
_OF_SWEEPS = ("hydra.sweep.", "hydra.sweeper.", "hydra/sweeper", "hydra/launcher", "sweep.")
_OF_LAUNCHERS = ("launcher.max_jobs", "launcher.devices_per_job", "launcher.wait")


def is_sweep(overrides: Sequence[str]) -> bool:
    """Return whether `sweep=` names a sweep, which then needs no `-m`."""
    selects_sweep = any(override.startswith("sweep=") and override != "sweep=none" for override in overrides)
    selects_sweep |= "hydra.mode=MULTIRUN" in overrides
    # mode=wandb_sweep only writes a sweep's YAML, and each trial of that sweep is a single run
    return selects_sweep and not {"mode=wandb_sweep", "hydra.mode=RUN"} & set(overrides)


def reject_settings_of_sweep(overrides: Sequence[str]) -> list[ConfigError]:
    """Return the errors in settings that a sweep alone reads, typed for a single run."""
    if {"mode=wandb_sweep", "hydra.mode=RUN"} & set(overrides):
        return []  # it writes a sweep, or is one job of a sweep on its own
    mistakes = []
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if not equals or not (key.startswith(_OF_SWEEPS) or key in _OF_LAUNCHERS):
            continue
        fix = f"hydra.run.dir={value}" if key == "hydra.sweep.dir" else "the same command without it"
        reason = "only a sweep, which -m starts, reads it"
        beside = "" if key == "hydra/launcher" else ", or -m beside it"  # where launcher.max_jobs says how many
        mistakes.append(ConfigError(override, reason, f"{for_shell(fix) if '=' in fix else fix}{beside}"))
    return mistakes


def run_sweep(overrides: list[str], folder: Path, name: str, run: Callable[..., int]) -> int:
    """Run the jobs of a sweep, several at a time, each in its own processes.

    Args:
        overrides: The overrides of the command line.
        folder: The config folder.
        name: The primary config.
        run: Runs one job in this process; used by Hydra's own launchers (`hydra/launcher=basic`).

    Returns:
        The exit code of the worst job, or 2 when the command is invalid.
    """
    if started_by() is not None:  # torchrun, srun or similar
        if global_rank() == 0:
            mistake = ConfigError(
                f"-m under {started_by()}",
                "every rank would run the whole sweep",
                type_command("-m … launcher.devices_per_job=<ranks of each job>"),
            )
            print(format_report([mistake]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    from recipes.sweep.command_line import check_command
    from recipes.sweep.main import PLUGIN_NAME, register
    from recipes.sweep.session import MULTIRUN

    command = check_command(overrides, config_folder=folder, config_name=name)
    # only the first job is checked here, and with skip_invalid=true it may be one that is skipped
    if mistakes := command.of_sweep if command.skips_invalid else command.mistakes:
        print(format_report(mistakes), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    MULTIRUN.config_folder, MULTIRUN.config_name = folder, name
    MULTIRUN.ranking = command.ranking
    MULTIRUN.keys, MULTIRUN.command, MULTIRUN.exit_code = command.keys, sys.argv[1:], 0
    register()
    flags = ["--multirun"]
    if not any(override.startswith("hydra/launcher=") for override in overrides):
        flags.append(f"hydra/launcher={PLUGIN_NAME}")
    for_hydra = [*command.for_hydra, *command.ranking]
    sys.argv[1:] = [*flags, *for_hydra]
    return run_through_hydra(folder, name, run, for_hydra) or MULTIRUN.exit_code


# Register the launcher and the sweeper as Hydra plugins in code, so that no plugin package has to be installed.

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
