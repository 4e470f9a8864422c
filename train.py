"""Train, evaluate, sample, sweep: compose one config, check it, run it. `python train.py --help` lists the settings."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.config import compose_and_check
from recipes.config.check.config_folder import check_config_folder
from recipes.config.compose import quote_options
from recipes.config.overrides import drop_replaced
from recipes.entry.hydra_main import (
    describe_version,
    find_missing_folder,
    find_wrong_flags,
    for_hydra,
    is_for_hydra,
    parse_flags,
    run_through_hydra,
)
from recipes.entry.run import run_resolved
from recipes.entry.torchrun import compose_on_rank_zero
from recipes.entry.variables_file import read_variables
from recipes.errors import INSTALLED, ConfigError, format_report, shell
from recipes.launcher.environ import forget_slurm
from recipes.launcher.submit import is_for_cluster, submit
from recipes.pipeline.main import is_pipeline, run_pipeline
from recipes.project import NEW, write_project
from recipes.runtime.console import accept_any_text, say
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.process import exit_process
from recipes.runtime.torch_variables import find_variables_of_torch
from recipes.runtime.world import find_wrong_variables, global_rank, settle_ranks
from recipes.sweep.main import is_sweep, reject_settings_of_sweep, run_sweep


def main() -> int:
    """Hand the command line to one run, one sweep, or Hydra's own flags; return the exit code."""
    accept_any_text()
    if mistakes := find_missing_folder():
        return report(mistakes)
    if sys.argv[1:2] == [NEW]:
        return write_new_project(sys.argv[2:])
    if "--version" in sys.argv[1:]:
        say(describe_version())
        return ExitCode.FINISHED
    said, mistakes = read_variables(Path.cwd(), os.environ)
    if said is not None and global_rank() == 0:
        print(said, file=sys.stderr)
    if mistakes:
        return report(mistakes)
    words = quote_options(drop_replaced(sys.argv[1:]))
    args, mistakes = parse_flags(words)
    sys.argv[1:] = for_hydra(args, words)  # which reads them too
    forget_slurm(args.overrides)
    if mistakes := [*mistakes, *find_wrong_variables(), *find_variables_of_torch(), *find_wrong_flags(args)]:
        print(format_report(mistakes), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    for line in settle_ranks():
        print(line, file=sys.stderr)
    folder = Path(args.config_path) if args.config_path else Path(__file__).parent / "conf"
    name = args.config_name or "config"
    if mistakes := check_config_folder(folder, name, args.overrides):
        return report(mistakes)
    if is_pipeline(args.overrides):
        return run_pipeline(args, folder, name)
    if is_for_hydra(args):
        return run_through_hydra(folder, name, run, args.overrides)
    if args.multirun or is_sweep(args.overrides):
        return run_sweep(args.overrides, folder, name, run)
    return run(args.overrides, folder, name)


def write_new_project(words: Sequence[str]) -> int:
    """Write a project and print what to type in its folder; return the exit code."""
    try:
        folder = write_project(words)
    except ConfigError as mistake:
        print(format_report([mistake], "No project was written."), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    say(f"{folder} has a project that trains; its README.md says what is where.")
    say(f"type: {shell('cd', folder)} && {INSTALLED} recipe=first")
    return ExitCode.FINISHED


def run(overrides: list[str], folder: Path, name: str, *, in_sweep: bool = False) -> int:
    """Compose and check one run, then run it here or submit it; return the exit code."""
    if not in_sweep and (unread := reject_settings_of_sweep(overrides)):
        return report(unread)
    resolved, mistakes = compose_on_rank_zero(
        lambda: compose_and_check(overrides, config_folder=folder, config_name=name)
    )
    if mistakes or resolved is None:
        return report(mistakes)
    if not in_sweep and is_for_cluster(resolved):
        return submit(resolved)
    return run_resolved(resolved, in_sweep=in_sweep)


def report(mistakes: Sequence[ConfigError]) -> int:
    """Print the mistakes and return the exit code; torchrun and srun start one of these processes per rank."""
    if global_rank() == 0:
        print(format_report(mistakes), file=sys.stderr)
    return ExitCode.INVALID_CONFIG


if __name__ == "__main__":
    exit_process(main())
