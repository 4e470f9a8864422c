"""Turn exceptions of Hydra, OmegaConf and the YAML reader into messages about an override or a file."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from recipes.config.check.sections import list_groups
from recipes.config.check.suggestions import list_options, suggest_option
from recipes.config.check.text_values import find_annotation
from recipes.config.check.types import describe, matches_type, placeholder
from recipes.config.compose import CONF, Composed, in_words
from recipes.config.overrides import for_shell
from recipes.config.trust import find_own_folders
from recipes.errors import ConfigError

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
_UNSET = re.compile(r"Environment variable '(\w+)' not found")
# what Hydra says about an entry of a defaults list
_UNKNOWN_ENTRY = re.compile(r"Could not (?:find|load) '([\w/.-]+)'")
# sections of Hydra that are folders to whoever types them
_FOLDERS = {"hydra.run": "hydra.run.dir", "hydra.sweep": "hydra.sweep.dir"}
_REFERENCE = re.compile(r"(?<!\\)\$\{")


def explain_override(override: str, error: Exception, composed: Composed) -> ConfigError:
    """Return the error in an override without which the others can be composed.

    Args:
        override: Override of an existing key, possibly with `++` added.
        error: Exception raised when composing with it.
        composed: The run without it.
    """
    typed = override.removeprefix("++")
    if r"$\{" in typed:  # as Hydra writes a reference for a job of its grid
        typed = typed.replace(r"$\{", "${").replace(r"\}", "}")
    if isinstance(error, ConfigError) and (not error.setting.endswith("=…") or typed.startswith("resume=")):
        return error  # of a file of the resumed run, or of one of its overrides
    key, _, value = typed.lstrip("+~").partition("=")
    if variable := _UNSET.search(_last_line(error)):
        annotation = find_annotation(composed.config, key)
        is_text = annotation is None or matches_type(variable[1], annotation)
        again = "" if is_text else f", and '{key}=${{oc.decode:${{oc.env:{variable[1]}}}}}', as a variable is text"
        fix = f"{variable[1]}=<value> before the command{again}"
        return ConfigError(typed, f"the environment variable {variable[1]} is not set", fix)
    if _REFERENCE.search(value):
        reason = f"`${{` begins a reference to another setting: {_last_line(error)}"
        return ConfigError(typed, reason, f"{key}=<value>, or \\${{ instead of ${{ where it is text")
    if typed.startswith("~") and value:  # `~key=value` deletes only this value
        return ConfigError(typed, "~ removes a setting, and this one has another value", f"{key}={value}")
    if typed.startswith("~") and _last_line(error).endswith("does not exist."):
        group = key.partition(".")[0]
        fix = f"{group}=<an option of your own without it, in a folder of hydra.searchpath>"
        return ConfigError(typed, "it is null, and Hydra (1.3) removes no setting that is null", fix)
    if typed.startswith("~"):
        return ConfigError(typed, f"other settings refer to it: {_last_line(error)}", f"{key}=<value>")
    if key in _FOLDERS:
        return ConfigError(typed, _last_line(error), for_shell(f"{_FOLDERS[key]}={value}"))
    annotation = find_annotation(composed.config, key)
    if annotation is not None:
        return ConfigError(typed, f"it takes {describe(annotation)}", f"{key}=<{placeholder(annotation)}>")
    if _last_line(error).startswith("Cannot merge DictConfig with ListConfig") and value.startswith("{"):
        return ConfigError(typed, "it takes a list", for_shell(f"{key}=[{value}]"))
    return ConfigError(typed, _last_line(error), f"{key}=<another value>")


def explain_typed(error: BaseException, overrides: Sequence[str]) -> ConfigError | None:
    """Return the error in the override of the key that OmegaConf names; None if it was not typed."""
    key = str(getattr(error, "full_key", None) or "")
    typed = next((override for override in overrides if override.lstrip("+").partition("=")[0] == key), None)
    if typed is None or not isinstance(error, Exception):
        return None
    return ConfigError(typed, _last_line(error), f"{key}=<another value>")


def explain_plugin(error: BaseException, overrides: Sequence[str]) -> ConfigError | None:
    """Return the error in what Hydra builds itself, its sweeper and launcher; None if the exception is not of that."""
    found = re.search(r"full_key: (hydra\.[\w.]+)", str(error))
    if found is None or not isinstance(error, Exception):
        return None
    key, reason = found[1], _last_line(error)
    typed = [text for text in overrides if text.lstrip("+~").partition("=")[0].startswith(key)]
    fix = "the same command without it" if typed else f"{key}=<another value>"
    return ConfigError(" ".join(typed) or f"{key}=…", reason, fix)


def explain_option(override: str, error: Exception) -> ConfigError:
    """Return the error in an override that chooses an option, or adds one, which the chosen config does not take."""
    reason = _last_line(error)
    fix = f"+{override}" if f"use +{override}" in reason else "the same command without it"
    return ConfigError(override, reason.partition(" Did you mean")[0].rstrip("."), fix)


def is_broken_file(error: BaseException | None) -> bool:
    """Return whether an exception of the composition is about the content of a file."""
    while error is not None:
        if isinstance(error, YAMLError) or str(error).startswith("In '"):  # Hydra names the file of a defaults list so
            return True
        error = error.__cause__
    return False


def explain_broken_file(error: BaseException, folder: Path, typed: Sequence[str]) -> ConfigError:
    """Return the message of Hydra or the YAML reader with its causes: the innermost names the file.

    Args:
        error: Exception raised when composing.
        folder: Config folder.
        typed: Overrides of this command line.
    """
    folders = dict.fromkeys(path.resolve() for path in (folder, *find_own_folders(typed)))
    names = ["conf" if path == CONF.resolve() else str(path) for path in folders]
    where = f"a file under {' or '.join(f'{name}/' for name in names)}"
    lines = [line.strip() for text in _messages(error) for line in text.splitlines() if line.strip()]
    reason = " ".join(dict.fromkeys(lines))
    for path in folders:
        if file := next(_find_undecodable(path), None):
            return ConfigError(
                str(file), "it is not text in UTF-8", f"the file in UTF-8: iconv -f LATIN1 -t UTF-8 {file}"
            )
    if repeated := re.search(r"To override a value use 'override (\S+): (\S+)'", reason):
        group, option = repeated.groups()
        files = [file for path in folders if path != CONF.resolve() for file in _find_line(path, group, option)]
        if len(files) == 1:
            reason = f"every run has an option of {group} already, and this adds a second one"
            return ConfigError(str(files[0]), reason, f"- override /{group}: {option} in that file")
    if mark := find_mark(error):
        return mark
    if entry := _explain_entry(reason, folders, typed):
        return entry
    return ConfigError(where, reason, "a corrected version of that file")


def find_mark(error: BaseException | None) -> ConfigError | None:
    """Return the error at the line of a file that the YAML reader names; None if it names none."""
    while error is not None and not isinstance(error, MarkedYAMLError):
        error = error.__cause__
    mark = error.problem_mark if error is not None else None
    if error is None or mark is None or not os.path.isfile(mark.name):
        return None
    place = f"{mark.name}, line {mark.line + 1}"
    if "'\\t'" in str(error.problem):
        return ConfigError(place, "YAML indents by spaces, and a tab is none", f"spaces instead of the tab in {place}")
    reason = " ".join(str(text) for text in (error.problem, error.context) if text)
    return ConfigError(place, f"it is not YAML: {reason}", f"a corrected {place}")


def _explain_entry(reason: str, folders: Iterable[Path], typed: Sequence[str]) -> ConfigError | None:
    """Return the error in the defaults list of an own file; None if Hydra's message is of something else."""
    own = sorted(folders, key=lambda folder: folder == CONF.resolve())  # a file added to conf/ is one's own, too
    if found := re.search(r"(?:In|Invalid defaults list in) '([\w/.-]+)'", reason):
        named = next((file for folder in own if (file := folder / f"{found[1]}.yaml").is_file()), None)
    else:
        named = None
    if named and (got := re.search(r"defaults must be a list \(got (\w+)\)", reason)):
        reason = "text" if got[1] == "str" else f"a {got[1]}"
        return ConfigError(f"defaults: in {named}", f"it takes a list, and this is {reason}", "defaults: [<option>]")
    if found := re.search(r"Could not override '([\w/.-]+)'", reason):
        near = get_close_matches(found[1], list_groups(), 1)
        for file, number, line in _find_entries(own, re.escape(found[1])):
            fix = line.replace(found[1], near[0]) if near else f"no such entry, as conf/ has no {found[1]}"
            place = f"{file}, line {number}"
            return ConfigError(f"{place}: {line}", f"there is no group {found[1]!r}", f"{fix} in {place}")
    if found := _UNKNOWN_ENTRY.search(reason):
        group, _, wrong = found[1].rpartition("/")
        nested = group.rpartition("/")[2]  # `- optimizer: lion` of a recipe, which means recipe/optimizer
        for file, number, line in _find_entries(own, re.escape(wrong)):
            place, shown = f"{file}, line {number}", f"{file}, line {number}: {line}"
            if "/" in group and (CONF / nested).is_dir():
                reason = "a group begins with / in a file of another one, and every run has an option of it already"
                return ConfigError(shown, reason, f"- override /{nested}: {wrong} in {place}")
            if not (options := list_options(group, typed)):
                continue
            meant = suggest_option(group, wrong, typed).partition("=")[2]
            fix = re.sub(rf"(?<![\w-]){re.escape(wrong)}(?![\w-])", lambda _: meant, line)  # noqa: B023  called here
            return ConfigError(shown, f"the options of {group} are {' '.join(options)}", f"{fix} in {place}")
    if named and (got := re.search(r"raised while composing config: (.*?) full_key: (\S*)", reason)):
        is_list = got[1].startswith("Cannot merge DictConfig with ListConfig")
        reason = "it holds a list, and a config is a section of settings, `key: value`" if is_list else got[1]
        return ConfigError(str(named), reason, f"a corrected {named}")
    return None


def _find_entries(folders: Iterable[Path], name: str) -> Iterator[tuple[Path, int, str]]:
    """Yield the lines of own files with an entry of a defaults list that matches: file, number, text."""
    entry = re.compile(rf"\s*-\s.*(?<![\w-]){name}(?![\w-]).*|\s*defaults\s*:.*{name}.*")
    for folder in folders:
        for file in sorted(folder.rglob("*.yaml")):
            for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), start=1):
                if entry.fullmatch(line):
                    yield file, number, line.strip()


def _find_undecodable(folder: Path) -> Iterator[Path]:
    """Yield the config files that are not UTF-8."""
    for file in sorted(folder.rglob("*.yaml")):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield file


def _find_line(folder: Path, group: str, option: str) -> Iterator[Path]:
    """Yield the files with an entry `- /group: option` in their defaults list."""
    entry = re.compile(
        rf"^\s*-\s*(?!override\s)(?:\w+\s+)?/?{re.escape(group)}\s*:\s*{re.escape(option)}\b", re.MULTILINE
    )
    for file in sorted(folder.rglob("*.yaml")):
        if entry.search(file.read_text(encoding="utf-8-sig")):
            yield file


def _messages(error: BaseException) -> list[str]:
    messages = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        messages.append(str(error))
    return messages


def _last_line(error: Exception) -> str:
    """Return the message of the innermost cause in one line, without OmegaConf's details."""
    if isinstance(error, ConfigError):
        return error.reason
    lines = [line.strip() for line in _messages(error)[-1].splitlines()]
    details = ("full_key:", "object_type=", "reference_type=")
    return in_words(" ".join(line for line in lines if line and not line.startswith(details)))
