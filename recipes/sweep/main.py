"""Start a sweep: `-m`, or `sweep=<option>` without it."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes.entry.hydra_main import run_through_hydra
from recipes.errors import ConfigError, format_report
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.world import global_rank, started_by


def is_sweep(overrides: Sequence[str]) -> bool:
    """Whether `sweep=` names a sweep, which then needs no `-m`."""
    named = [word for word in overrides if word.startswith("sweep=") and word != "sweep=none"]
    # mode=wandb_sweep writes the description of one, and each of its trials is a single run
    return bool(named) and not {"mode=wandb_sweep", "hydra.mode=RUN"} & set(overrides)


def run_sweep(overrides: list[str], folder: Path, name: str, run: Callable[..., int]) -> int:
    """Run the jobs of a sweep, several at a time, each in processes of its own.

    Args:
        overrides: The command line.
        folder: Config folder.
        name: Config file that composition starts from.
        run: Runs one job in this process, for launchers other than ours.

    Returns:
        The exit code of the worst job.
    """
    if started_by() is not None:
        if global_rank() == 0:
            print(format_report([_started_by_a_launcher()]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    from recipes.sweep.command_line import check_command
    from recipes.sweep.plugins import PLUGIN_NAME, register
    from recipes.sweep.session import MULTIRUN

    command = check_command(overrides, config_folder=folder, config_name=name)
    # with skip_invalid=true the first job may be one that is skipped
    if command.mistakes and "sweep.skip_invalid=true" not in overrides:
        print(format_report(command.mistakes), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    register(folder, name, keys=command.keys, command=sys.argv[1:])
    flags = ["--multirun"]
    if not any(override.startswith("hydra/launcher=") for override in overrides):
        flags.append(f"hydra/launcher={PLUGIN_NAME}")
    sys.argv[1:] = [*flags, *command.for_hydra]
    return run_through_hydra(folder, name, run) or MULTIRUN.exit_code


def _started_by_a_launcher() -> ConfigError:
    return ConfigError(
        f"-m under {started_by()}",
        "each of its ranks would run the whole sweep",
        "python train.py -m … launcher.devices_per_job=<ranks of each job>",
    )
