"""Handle command lines for Hydra itself: `--help`, `--cfg`, and `-m` with its sweepers and launchers."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes.config.trust import CONF, find_trusted_folders, restrict_variables
from recipes.errors import ConfigError, ConfigErrors, find_mistake, format_report
from recipes.runtime.exit_codes import ExitCode

_FLAGS = ("help", "hydra_help", "cfg", "info", "shell_completion")


def is_for_hydra(args: Namespace) -> bool:
    """Return whether the command line has one of Hydra's own flags, which do not start a run."""
    return any(getattr(args, flag) for flag in _FLAGS)


def find_wrong_flags(args: Namespace) -> list[ConfigError]:
    """Return the errors in Hydra's flags that name a folder or a file."""
    mistakes = []
    if args.config_dir and not is_for_hydra(args):
        fix = f"'hydra.searchpath=[file://{Path(args.config_dir).absolute()}]'"
        mistakes.append(ConfigError(f"--config-dir {args.config_dir}", "it is not read", fix))
    folder, name = args.config_path, args.config_name or "config"
    if folder and not os.path.isdir(folder):
        fix = "--config-path <a run folder or a folder like conf/>"
        mistakes.append(ConfigError(f"--config-path {folder}", "there is no such folder", fix))
    elif (folder or args.config_name) and not os.path.isfile(Path(folder or CONF) / f"{name}.yaml"):
        names = sorted(path.stem for path in Path(folder or CONF).glob("*.yaml"))
        fix = f"--config-name {names[0]}" if names else "--config-path <a folder with a config.yaml>"
        mistakes.append(ConfigError(f"--config-name {name}", f"{folder or 'conf'} has no {name}.yaml", fix))
    return mistakes


def run_through_hydra(folder: Path, name: str, run: Callable[..., int], overrides: Sequence[str] = ()) -> int:
    """Let Hydra handle the command line.

    Args:
        folder: Config folder.
        name: Name of the primary config.
        run: Runs one job and returns its exit code; for launchers that run their jobs in this process, one by one.
        overrides: Command-line overrides, to name the wrong one.

    Returns:
        The worst exit code of all jobs.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from recipes.config.check.command_line import compose_overrides
    from recipes.config.check.composition_errors import explain_broken_file, explain_typed
    from recipes.config.compose import register_resolvers
    from recipes.config.search_path import listing_own_options, select_search_path

    exit_codes: list[int] = [ExitCode.FINISHED]

    def run_job(_: object) -> None:
        overrides = [*select_search_path(HydraConfig.get().overrides.hydra), *HydraConfig.get().overrides.task]
        overrides.append(f"hydra.run.dir='{HydraConfig.get().runtime.output_dir}'")
        exit_codes.append(run(overrides, folder, name, in_sweep=True))
        if exit_codes[-1] == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt  # ends the sweep, not only this job

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raises errors instead of printing them
    is_own = folder.resolve() in find_trusted_folders(overrides)
    register_resolvers(*([] if is_own else [restrict_variables(overrides)]))
    try:
        with listing_own_options(overrides):
            hydra.main(version_base="1.3", config_path=str(folder.resolve()), config_name=name)(run_job)()
        if sys.stdout is not None:  # closed by the shell, `>&-`
            sys.stdout.flush()
    except ConfigErrors as error:
        print(format_report(error.mistakes, error.head), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        named = find_mistake(error) or explain_typed(error, overrides)
        mistakes = [named] if named else []
        if overrides and not named:
            _, mistakes = compose_overrides(overrides, config_folder=folder, config_name=name)
        print(format_report(mistakes or [explain_broken_file(error, folder, overrides)]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except BrokenPipeError:  # `--help | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return max(exit_codes)
