"""Start a pipeline: `pipeline=<name>`."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.config.overrides import for_shell
from recipes.errors import ConfigError, format_report, type_command
from recipes.files import count
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.world import global_rank, started_by
from recipes.sweep.main import is_sweep, reject_settings_of_sweep

if TYPE_CHECKING:
    from recipes.launcher import Launcher
    from recipes.pipeline.command_line import PipelineCommand
    from recipes.pipeline.pipeline import Pipeline, Planned

LOG_FILE = "pipeline.log"


def is_pipeline(overrides: Sequence[str]) -> bool:
    """Return whether the command line is that of a pipeline."""
    return any(override.lstrip("+").startswith("pipeline=") for override in overrides)


def run_pipeline(args: Namespace, folder: Path, name: str) -> int:
    """Check all stages of a pipeline, then run them one after the other, each in its own processes.

    Args:
        args: Flags of Hydra, and the overrides of the command line.
        folder: The config folder.
        name: The primary config.

    Returns:
        The exit code: that of the stage that ended the pipeline, or 2 when a stage or the command is invalid.
    """
    if mistakes := _reject_others(args):
        return _report(mistakes)
    from recipes.pipeline.pipeline import check_pipeline
    from recipes.runtime.console import say
    from recipes.runtime.lock import lock_run_folder

    command, planned, mistakes = check_pipeline(args.overrides, config_folder=folder, config_name=name)
    if args.help and not mistakes:
        say(_describe(command))
        return ExitCode.FINISHED
    if mistakes := mistakes or [*_check_folder(command.folder)]:
        return _report(mistakes)
    try:
        launcher = _make_launcher(planned)
        _create_folder(command.folder)
        with lock_run_folder(command.folder):
            return _run(_open(command, planned, launcher, args.overrides, folder, name))
    except ConfigError as mistake:
        return _report([mistake])
    except KeyboardInterrupt:  # before a stage ran, or after the last one
        return ExitCode.INTERRUPTED


def _run(pipeline: "Pipeline") -> int:
    """Run the stages that are left; return the exit code."""
    from rich.console import Console

    from recipes.runtime.console import LOGGER
    from recipes.sweep.live_table import LiveTable
    from recipes.sweep.pool import Pool, worst_exit_code

    LOGGER.info(f"Pipeline {pipeline.name}: {count(len(pipeline.jobs), 'stage')}, in {pipeline.folder}")
    table = LiveTable(Console(), pipeline.jobs, pipeline.names)
    pool = Pool(pipeline.launcher, pipeline, on_change=pipeline.on_change, show=table.show)
    try:
        with table.updating():
            stop_signal = pool.run()
    finally:
        pipeline.log_end()
    return pipeline.exit_code if stop_signal is None else worst_exit_code(pipeline.jobs, stop_signal)


def _make_launcher(planned: Sequence["Planned"]) -> "Launcher":
    """Return the launcher of all stages, that of the first one.

    Raises:
        ConfigError: It does not wait for its jobs.
    """
    first = planned[0].run
    assert first is not None, "a pipeline with errors is not started"
    launcher: Launcher = first.make("launcher")
    if not launcher.waits:
        reason = "each stage starts once the one before has finished, and this launcher does not wait for that"
        raise ConfigError(f"launcher={first.choices.get('launcher', '…')}", reason, "wait: true in that option")
    return launcher


def _open(
    command: "PipelineCommand",
    planned: Sequence["Planned"],
    launcher: "Launcher",
    typed: Sequence[str],
    folder: Path,
    name: str,
) -> "Pipeline":
    """Return the pipeline, with what writes its page.

    Raises:
        ConfigError: The file of an earlier command is damaged.
    """
    from recipes.config import compose_and_check
    from recipes.config.search_path import select_search_path
    from recipes.pipeline.pipeline import Pipeline

    pages, mistakes = compose_and_check(
        [*select_search_path(typed), "mode=report"], config_folder=folder, config_name=name
    )
    assert pages is not None, mistakes
    return Pipeline(
        name=command.name,
        folder=command.folder,
        planned=planned,
        launcher=launcher,
        config_folder=folder,
        config_name=name,
        typed=typed,
        write_page=partial(pages.make("mode.write_stages"), command.name, dashboard=pages.config["mode"]["dashboard"]),
    )


def _reject_others(args: Namespace) -> list[ConfigError]:
    """Return the errors in what else would decide what is started."""
    overrides: list[str] = args.overrides
    typed = next(text.lstrip("+") for text in overrides if is_pipeline([text]))
    if started_by() is not None:
        reason = "every rank would run the whole pipeline, which starts the ranks of each stage itself"
        return [ConfigError(f"{typed} under {started_by()}", reason, type_command(typed))]
    if args.multirun or is_sweep(overrides):
        reason = "a sweep varies one run, and this is several"
        return [ConfigError(f"-m {typed}", reason, f"-m with what one stage is, or {type_command(typed)}")]
    flags = [f"--{name}" for name in ("cfg", "info", "resolve", "package", "shell_completion") if getattr(args, name)]
    if flags:
        reason = "it shows the config of one run, and this is several"
        return [
            ConfigError(f"{flags[0]} {typed}", reason, f"{type_command(f'{typed} --help')}, and then that of a stage")
        ]
    return reject_settings_of_sweep(overrides)


def _check_folder(folder: Path) -> list[ConfigError]:
    from recipes.run_folder import PAGE_FILE, has_run, is_page, may_replace

    setting, fix = f"hydra.run.dir={folder}", "hydra.run.dir=<another folder>"
    if has_run(folder):
        return [ConfigError(setting, "it is the folder of a run, whose report this pipeline would replace", fix)]
    if not may_replace(folder / PAGE_FILE, is_page):
        return [ConfigError(setting, f"it holds a {PAGE_FILE} of something else, which this one would replace", fix)]
    return []


def _create_folder(folder: Path) -> None:
    from recipes.runtime.console import open_console

    try:
        folder.mkdir(parents=True, exist_ok=True)
        open_console(folder / LOG_FILE)
    except OSError as error:
        reason = f"the folder cannot be written to: {error.strerror}"
        raise ConfigError(f"hydra.run.dir={folder}", reason, "hydra.run.dir=<a folder of yours>") from error


def _describe(command: "PipelineCommand") -> str:
    """Return what `--help` says of a pipeline: the command that each stage is."""
    lines = [f"pipeline={command.name}: {count(len(command.stages), 'stage')}, in {command.folder}", ""]
    for stage in command.stages:
        key = "start_from" if stage.trains else "resume"
        source = next((each.folder for each in command.stages if each.name == stage.source), None)
        words = [*stage.overrides, *([] if source is None else [f"{key}={source}"])]
        lines.append(f"{stage.folder.name}: {type_command(' '.join(map(for_shell, words)))}")
    name = command.stages[0].name
    lines += ["", f"An override applies to every stage that trains, stages.{name}.optimizer.lr=1e-4 to one.", ""]
    return "\n".join(
        [*lines, "The same command resumes; a stage that has changed runs again, with what depends on it."]
    )


def _report(mistakes: Sequence[ConfigError]) -> int:
    if global_rank() == 0:
        print(format_report(mistakes), file=sys.stderr)
    return ExitCode.INVALID_CONFIG
