"""Command lines that Hydra handles itself: `--help`, `--cfg`, and `-m` with its sweepers and launchers."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from recipes.errors import ConfigError, ConfigErrors, format_report
from recipes.runtime.exit_codes import ExitCode

_FLAGS = ("help", "hydra_help", "cfg", "info", "shell_completion")


def is_for_hydra(args: Namespace) -> bool:
    """Return whether the command line has one of Hydra's own flags, which start no run."""
    return any(getattr(args, flag) for flag in _FLAGS)


def run_through_hydra(folder: Path, name: str, run: Callable[..., int]) -> int:
    """Let Hydra handle the command line.

    Args:
        folder: Config folder.
        name: Name of the config file that composition starts from.
        run: Runs one job and returns its exit code; for launchers that run their jobs in this process, one by one.

    Returns:
        The worst exit code of all jobs.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    from recipes.config.compose import register_resolvers

    exit_codes: list[int] = [ExitCode.FINISHED]

    def run_job(_: object) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        overrides.append(f"hydra.run.dir='{HydraConfig.get().runtime.output_dir}'")
        exit_codes.append(run(overrides, folder, name, in_sweep=True))
        if exit_codes[-1] == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt  # ends the sweep, not only this job

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raises errors instead of printing them
    register_resolvers()
    try:
        hydra.main(version_base="1.3", config_path=str(folder.resolve()), config_name=name)(run_job)()
    except ConfigErrors as error:
        print(format_report(error.mistakes, error.head), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except ConfigError as mistake:
        print(format_report([mistake]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except HydraException as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return max(exit_codes)
