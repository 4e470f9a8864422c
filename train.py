"""Compose, check, launch. `python train.py --help` says what may be typed; nothing heavy is imported early."""

import os
import sys
from pathlib import Path

from recipes.config import compose_and_check
from recipes.config.compose import as_options
from recipes.entry.run import EXIT_INTERRUPTED, EXIT_WRONG_CONFIG, launch
from recipes.entry.torchrun import composed_by_rank_zero
from recipes.errors import Mistake, MistakesError, report
from recipes.launcher.environ import forget_slurm
from recipes.launcher.submit import is_for_cluster, submit
from recipes.runtime.process import leave
from recipes.runtime.world import global_rank, started_by

HYDRAS_OWN = ("help", "hydra_help", "cfg", "info", "shell_completion")


def main() -> int:
    from hydra._internal.utils import get_args_parser

    sys.argv[1:] = as_options(sys.argv[1:])  # which Hydra reads too
    args = get_args_parser().parse_args()
    forget_slurm(args.overrides)
    folder = Path(args.config_path) if args.config_path else Path(__file__).parent / "conf"
    name = args.config_name or "config"
    if any(getattr(args, flag) for flag in HYDRAS_OWN):
        return through_hydra(folder, name)
    if args.multirun or asks_for_sweep(args.overrides):
        return sweep(args.overrides, folder, name)
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
    if not in_sweep and is_for_cluster(composed):
        return submit(composed)
    return launch(composed, in_sweep=in_sweep)


def asks_for_sweep(overrides: list[str]) -> bool:
    """Whether `sweep=` names one, which then needs no `-m`."""
    named = [word for word in overrides if word.startswith("sweep=") and word != "sweep=none"]
    # the description of one for W&B, and each of its trials, are a single run
    return bool(named) and not {"mode=wandb_sweep", "hydra.mode=RUN"} & set(overrides)


def sweep(overrides: list[str], folder: Path, name: str) -> int:
    """`-m`: jobs side by side, each in processes of its own; the exit code of the worst."""
    if started_by() is not None:
        refused = Mistake(
            f"-m under {started_by()}",
            "each of its ranks would carry out the whole sweep",
            "python train.py -m … launcher.devices_per_job=<ranks of each job>",
        )
        if global_rank() == 0:
            print(report([refused]), file=sys.stderr)
        return EXIT_WRONG_CONFIG
    from recipes.sweep.command_line import check_words
    from recipes.sweep.hydra_launcher import NAME, TYPED, register

    words = check_words(overrides, config_folder=folder, config_name=name)
    # a first job with a wrong config may be left out
    if words.mistakes and "sweep.skip_refused=true" not in overrides:
        print(report(words.mistakes), file=sys.stderr)
        return EXIT_WRONG_CONFIG
    register(folder, name, keys=words.keys, command=sys.argv[1:])
    flags = ["--multirun"]
    if not any(word.startswith("hydra/launcher=") for word in overrides):
        flags.append(f"hydra/launcher={NAME}")
    sys.argv[1:] = [*flags, *words.for_hydra]
    return through_hydra(folder, name) or TYPED.exit_code


def through_hydra(folder: Path, name: str) -> int:
    """Hydra's own flags: help, printing the config, sweeps. Another launcher than ours runs the jobs here in turn."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    from recipes.config.compose import register_resolvers

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
    except MistakesError as error:
        print(report(error.mistakes, error.head), file=sys.stderr)
        return EXIT_WRONG_CONFIG
    except Mistake as mistake:
        print(report([mistake]), file=sys.stderr)
        return EXIT_WRONG_CONFIG
    except HydraException as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return max(exit_codes)


if __name__ == "__main__":
    leave(main())
