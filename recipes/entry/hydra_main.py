"""Handle command lines for Hydra itself: `--help`, `--cfg`, and `-m` with its sweepers and launchers."""

import contextlib
import io
import itertools
import os
import re
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from recipes.config.trust import CONF, find_trusted_folders, restrict_variables
from recipes.errors import ConfigError, ConfigErrors, find_mistake, format_report, shell, type_command
from recipes.runtime.exit_codes import ExitCode

_FLAGS = ("help", "hydra_help", "cfg", "info", "shell_completion")
_COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")  # of which Hydra does one at a time
_OF_CFG = ("resolve", "package")
_CONFIG_FILE = "--config"
_SHELLS = ("install=", "uninstall=", "query=")


class _FlagError(Exception):
    """What argparse says about a flag, instead of its usage text."""


def parse_flags(words: Sequence[str]) -> tuple[Namespace, list[ConfigError]]:
    """Parse the flags of Hydra, which may stand anywhere between the overrides.

    Returns:
        The flags and overrides, and the errors in them; the flags are empty if there are errors.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    mistakes = [
        _explain_dashes(word, following)
        for word, following in itertools.zip_longest(words, words[1:], fillvalue="")
        if word.startswith("-") and not _is_flag(word, [*parser._option_string_actions])
    ]
    if mistakes:
        return parser.parse_args([]), mistakes

    def reject(message: str) -> NoReturn:
        raise _FlagError(message)

    untyped: Any = parser
    untyped.error = reject
    try:
        return parser.parse_intermixed_args(list(words)), []
    except _FlagError as error:
        return parser.parse_args([]), [_explain_flag(str(error))]


def _explain_dashes(word: str, following: str) -> ConfigError:
    """Return the error in `--lr=1e-3`, or in `--lr 1e-3`, with the word that follows as its value."""
    from recipes.config.check.suggestions import suggest_name

    name, equals, value = word.lstrip("-").partition("=")
    if name == _CONFIG_FILE.lstrip("-"):
        file = Path(value or following or "mine.yaml")
        reason = "a file of your own is an option of a group, in a folder of yours"
        fix = f"'hydra.searchpath=[<a folder>]' recipe={file.stem}, with the file as <a folder>/recipe/{file.name}"
        return ConfigError(f"{word} {following}".strip(), reason, fix)
    is_value = not equals and following and "=" not in following and not following.startswith("--")
    typed, value = (f"{word} {following}", following) if is_value else (word, value if equals else "<value>")
    fix = suggest_name(name.replace("-", "_"), value)
    return ConfigError(typed, "settings are typed without dashes", _correct(fix, value))


def _correct(override: str, value: str) -> str:
    """Return an override, or what to type instead of it if there is no such setting: `max_steps`."""
    from recipes.config.check.command_line import compose_typed

    key, _, typed = override.partition("=")
    probe = f"{key}={'1' if typed == '<value>' else typed}"
    if typed != value or "<" in typed.replace("<value>", ""):
        return override
    _, mistakes = compose_typed([probe])
    meant = next((mistake.fix for mistake in mistakes if mistake.setting == probe), override)
    return re.sub("=1$", "=<value>", meant) if typed == "<value>" else meant


def _is_flag(word: str, known: Sequence[str]) -> bool:
    """Return whether a word is a flag; argparse would read `-model=gpt2` as -m, and -p as a flag with `recision=16`."""
    name = word.partition("=")[0]
    if name == _CONFIG_FILE:  # of Lightning's CLI; short for three flags of Hydra
        return False
    return name in known or (name.startswith("--") and any(flag.startswith(name) for flag in known))


def _explain_flag(message: str) -> ConfigError:
    """Return an error of argparse in three clauses."""
    choice = re.fullmatch(r"argument (--[\w-]+)\S*: invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
    if choice:
        flag, chosen, choices = choice[1], choice[2], choice[3].replace("'", "").split(", ")
        return ConfigError(f"{flag} {chosen}", f"the choices are {' '.join(choices)}", f"{flag} {choices[0]}")
    missing = re.fullmatch(r"argument (--[\w-]+)\S*: expected one argument", message)
    if missing:
        return ConfigError(missing[1], "it needs a value", f"{missing[1]} <value>")
    return ConfigError("the flags of this command", message, type_command("--hydra-help for what there is"))


def for_hydra(args: Namespace, words: Sequence[str]) -> list[str]:
    """Return the words with all overrides before the flags: Hydra parses them again, and rejects any other order."""
    flags = list(words)
    for override in args.overrides:
        flags.remove(override)
    return [*args.overrides, *flags]


def is_for_hydra(args: Namespace) -> bool:
    """Return whether the command line has one of Hydra's own flags, which do not start a run."""
    return any(getattr(args, flag) for flag in _FLAGS)


def find_missing_folder() -> list[ConfigError]:
    """Return the error of a working directory that has been deleted, below which all paths of a run would be."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return [ConfigError("the working directory", "it has been deleted", "cd <a folder that exists>")]
    return []


def find_wrong_flags(args: Namespace) -> list[ConfigError]:
    """Return the errors in Hydra's flags that contradict each other, have no effect, or name a folder or a file."""
    mistakes = []
    commands = [f"--{name.replace('_', '-')}" for name in _COMMANDS if getattr(args, name)]
    if len(commands) > 1:
        fix = f"the same command without {commands[0]}"
        mistakes.append(ConfigError(" ".join(commands), "each is a command of its own", fix))
    for name in _OF_CFG:
        if (value := getattr(args, name)) and not (args.cfg or (args.help and name == "resolve")):
            shown = f"--{name}" if value is True else f"--{name} {value}"
            mistakes.append(ConfigError(shown, "only --cfg, which prints the config, reads it", f"--cfg job {shown}"))
    if args.experimental_rerun:
        fix = "--config-path <a run folder> --config-name config"
        mistakes.append(ConfigError(f"--experimental-rerun {args.experimental_rerun}", "it is not read", fix))
    if args.shell_completion and sum(text.startswith(_SHELLS) for text in args.overrides) != 1:
        reason = "it needs what to do, and for which shell"
        mistakes.append(ConfigError("--shell-completion", reason, "--shell-completion install=bash"))
    if args.config_dir and not is_for_hydra(args):
        fix = f"'hydra.searchpath=[file://{Path(args.config_dir).absolute()}]'"
        reason = "a setting has its place here, which names the folders of your own options"
        mistakes.append(ConfigError(f"--config-dir {args.config_dir}", reason, fix))
    folder, name = args.config_path, args.config_name or "config"
    if not folder and (found := _find_own_file(name, args.overrides)):
        mistakes.append(found)
        return mistakes
    if folder and not os.path.isdir(folder):
        fix = "--config-path <a run folder or a folder like conf/>"
        mistakes.append(ConfigError(f"--config-path {folder}", "there is no such folder", fix))
    elif (folder or args.config_name) and not os.path.isfile(Path(folder or CONF) / f"{name}.yaml"):
        names = sorted(path.stem for path in Path(folder or CONF).glob("*.yaml"))
        fix = f"--config-name {names[0]}" if names else "--config-path <a folder with a config.yaml>"
        mistakes.append(ConfigError(f"--config-name {name}", f"{folder or 'conf'} has no {name}.yaml", fix))
    return mistakes


def describe_version() -> str:
    """Return the version of this project, and those of what it runs on."""
    packages = ("lightning-recipes", "torch", "lightning", "hydra-core")
    return ", ".join(f"{name} {metadata.version(name)}" for name in packages)


def _find_own_file(name: str, overrides: Sequence[str]) -> ConfigError | None:
    """Return the error in `--config-name` of what is no whole config: an option, by whatever name, or a file of one."""
    from recipes.config.search_path import find_config_folders

    typed = f"--config-name {name}"
    for folder in find_config_folders(overrides):
        for option in (name, f"recipe/{name}"):
            if "/" in option and os.path.isfile(folder / f"{option}.yaml"):
                group, _, chosen = option.rpartition("/")
                return ConfigError(typed, "it is an option of a group, not a whole config", f"{group}={chosen}")
        if folder != CONF and os.path.isfile(folder / f"{name}.yaml"):
            move = shell("mv", folder / f"{name}.yaml", folder / "recipe")
            fix = f"{move}, with # @package _global_ as its first line, and then recipe={name}"
            return ConfigError(typed, "an experiment is an option of the group recipe, which has its own folder", fix)
    return None


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

    from recipes.config.cached_compose import register_source
    from recipes.config.check.command_line import compose_typed
    from recipes.config.check.composition_errors import explain_broken_file, explain_plugin, explain_typed
    from recipes.config.compose import register_resolvers
    from recipes.config.search_path import listing_own_options, select_search_path

    exit_codes: list[int] = [ExitCode.FINISHED]

    def run_job(_: object) -> None:
        overrides = [*select_search_path(HydraConfig.get().overrides.hydra), *HydraConfig.get().overrides.task]
        overrides.append(f"hydra.run.dir='{HydraConfig.get().runtime.output_dir}'")
        exit_codes.append(run(overrides, folder, name, in_sweep=True))
        if exit_codes[-1] in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED, ExitCode.TERMINATED):
            raise KeyboardInterrupt  # ends the sweep, not only this job

    register_source()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raises errors instead of printing them
    is_own = folder.resolve() in find_trusted_folders(overrides)
    register_resolvers(*([] if is_own else [restrict_variables(overrides)]))
    try:
        with listing_own_options(overrides), _editing_help():
            hydra.main(version_base="1.3", config_path=str(folder.resolve()), config_name=name)(run_job)()
        if sys.stdout is not None:  # closed by the shell, `>&-`
            sys.stdout.flush()
    except SystemExit as error:
        if error.code != 1:  # 0 of --help, or that of the signal that has stopped a sweep
            return int(error.code or ExitCode.FINISHED)
        mistake = ConfigError("--package …", "the config has no such section", "--package <section>, such as trainer")
        print(format_report([mistake]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except ConfigErrors as error:
        print(format_report(error.mistakes, error.head), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        named = find_mistake(error) or explain_typed(error, overrides) or explain_plugin(error, overrides)
        mistakes = [named] if named else []
        if overrides and not named:
            _, mistakes = compose_typed(overrides, config_folder=folder, config_name=name)
        print(format_report(mistakes or [explain_broken_file(error, folder, overrides)]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except BrokenPipeError:  # `--help | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:
            raise
        typed = next((text for text in overrides if text.startswith("hydra.sweep.dir=")), "hydra.sweep.dir=…")
        reason = f"{error.filename} cannot be written to: {error.strerror}"
        print(format_report([ConfigError(typed, reason, "hydra.sweep.dir=<a folder of yours>")]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    except KeyboardInterrupt:
        return max(exit_codes) or ExitCode.INTERRUPTED
    return max(exit_codes)


@contextlib.contextmanager
def _editing_help() -> Iterator[None]:
    """Name the command as it was typed in `--help`, and break lines between words; a terminal breaks them within."""
    if {"--help", "-h"}.isdisjoint(sys.argv) or sys.stdout is None:
        yield
        return
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        lines = text.getvalue().replace("python train.py", type_command("").rstrip()).splitlines()
        width = shutil.get_terminal_size().columns - 1
        wrapper = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)
        for line in lines:
            name = re.match(r"\S.*?\s{2,}", line)  # of a setting, with its meaning in a second column
            wrapper.subsequent_indent = " " * (len(name[0]) if name and len(name[0]) <= width // 2 else 4)
            print(wrapper.fill(line) if sys.stdout.isatty() else line)
