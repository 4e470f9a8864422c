"""Compose, check, launch. `python train.py --help` says what may be typed; nothing heavy is imported early."""

import os
import sys
from pathlib import Path

from recipes.launch import (
    EXIT_INTERRUPTED,
    EXIT_WRONG_CONFIG,
    compose_and_check,
    launch,
    report,
)
from recipes.leave import leave
from recipes.rank import composed_by_rank_zero
from recipes.ranks import global_rank

HYDRAS_OWN = ("multirun", "help", "hydra_help", "cfg", "info", "shell_completion")


def main() -> int:
    from hydra._internal.utils import get_args_parser

    args = get_args_parser().parse_args()
    folder = Path(args.config_path) if args.config_path else Path(__file__).parent / "conf"
    name = args.config_name or "config"
    if any(getattr(args, flag) for flag in HYDRAS_OWN):
        return through_hydra(folder, name)
    return run(args.overrides, folder, name)


def run(overrides: list[str], folder: Path, name: str, *, in_sweep: bool = False) -> int:
    """One run; its exit code."""
    composed, mistakes = composed_by_rank_zero(
        lambda: compose_and_check(overrides, config_folder=folder, config_name=name)
    )
    if mistakes or composed is None:
        if global_rank() == 0:  # one of the ranks that torchrun or srun started
            print(report(mistakes), file=sys.stderr)
        return EXIT_WRONG_CONFIG
    return launch(composed, in_sweep=in_sweep)


def through_hydra(folder: Path, name: str) -> int:
    """Hydra's own flags: help, printing the config, sweeps (one job after the other)."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    from recipes.compose import register_resolvers

    exit_codes = [0]

    def job(_: object) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        overrides.append(f"hydra.run.dir='{HydraConfig.get().runtime.output_dir}'")
        exit_codes.append(run(overrides, folder, name, in_sweep=True))
        if exit_codes[-1] == EXIT_INTERRUPTED:
            raise KeyboardInterrupt  # ends the sweep, not only this job

    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that its errors reach this function
    register_resolvers()
    try:
        hydra.main(version_base="1.3", config_path=str(folder.resolve()), config_name=name)(job)()
    except HydraException as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return max(exit_codes)


if __name__ == "__main__":
    leave(main())
