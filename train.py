"""Compose, check, launch. `python train.py --help` says what may be typed; nothing heavy is imported before it must."""

import os
import sys
from pathlib import Path

from recipes.launch import EXIT_WRONG_CONFIG, compose_and_check, launch, report


def main() -> int:
    from hydra._internal.utils import get_args_parser

    args = get_args_parser().parse_args()
    if (
        args.multirun
        or args.help
        or args.hydra_help
        or args.cfg
        or args.info
        or args.shell_completion
    ):
        return through_hydra()
    config_folder = Path(args.config_path) if args.config_path else Path(__file__).parent / "conf"
    composed, mistakes = compose_and_check(
        args.overrides, config_folder=config_folder, config_name=args.config_name or "config"
    )
    if mistakes or composed is None:
        print(report(mistakes), file=sys.stderr)
        return EXIT_WRONG_CONFIG
    return launch(composed)


def through_hydra() -> int:
    """Hydra's own flags: help, printing the config, sweeps (one job after the other in this process)."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig

    from recipes.compose import register_resolvers

    exit_codes = [0]

    def job(_: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        overrides.append(f"hydra.run.dir='{HydraConfig.get().runtime.output_dir}'")
        composed, mistakes = compose_and_check(overrides)
        if mistakes or composed is None:
            print(report(mistakes), file=sys.stderr)
            exit_codes.append(EXIT_WRONG_CONFIG)
        else:
            exit_codes.append(launch(composed))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that its errors reach this function
    register_resolvers()
    try:
        hydra.main(version_base="1.3", config_path="conf", config_name="config")(job)()
    except HydraException as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_CONFIG
    return max(exit_codes)


if __name__ == "__main__":
    sys.exit(main())
