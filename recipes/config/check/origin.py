"""Check untrusted configs (a run folder or another config folder), which must not choose code to run or files to write.

Such a folder may have been downloaded. Its config may only select constructors that the options of conf/ name, each in
its own place. Anything else must be given on the command line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipes.config.instantiate import PARTIAL, TARGET
from recipes.config.overrides import for_shell, to_grammar
from recipes.config.signature import TargetNotFoundError, locate_code, read_signature
from recipes.config.traits import is_place_of_model
from recipes.config.trust import (
    CONF,
    COPIES,
    RUNS_FILE,
    find_resumed_run,
    find_trusted_folders,
    parse_values,
    read_yaml_files,
)
from recipes.errors import ConfigError, type_command

Place = tuple[str, ...]  # keys from the root of the config to a node
_ANY = "*"  # in groups of named nodes, such as callbacks, the name is arbitrary
# a YAML file of ten lines can expand to billions of values, or contain itself
_MAX_VALUES, _MAX_DEPTH = 100_000, 50
_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# launcher settings are written into a shell script: other characters could inject lines
_WORD = re.compile(r"[\w.:,@%+-]*")
_READER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FIX_OF_A_FORGERY = "a folder written by a run"
_CODE = "a folder may not choose the code that runs"


class _CodeError(ConfigError):
    """A class or a file of code that only the folder names, and that may be typed.

    Attributes:
        word: What is typed, if one trusts it.
        missing_package: Package of the class if it cannot be imported here.
    """

    def __init__(self, mistake: ConfigError, missing_package: str | None = None) -> None:
        super().__init__(mistake.setting, mistake.reason, mistake.fix)
        self.word = f"++{mistake.setting}"
        self.missing_package = missing_package


@dataclass(frozen=True, kw_only=True)
class _Admitted:
    """Constructors and strings named in trusted files.

    Attributes:
        nodes: Place, constructor and whether it is partial, for each node.
        texts: Place and value of every other string.
    """

    nodes: set[tuple[Place, str, bool]]
    texts: set[tuple[Place, str]]


def check_origin(config: Mapping[str, Any], typed: Sequence[str], origin: Path) -> Iterator[ConfigError]:
    """Reject names in a folder's config that appear neither in conf/ nor on the command line; imports nothing.

    Args:
        config: Composed config, plain values.
        typed: Command-line overrides.
        origin: Source of the config.
    """
    found = list(_walk(config))
    if len(found) > _MAX_VALUES or any(len(place) > _MAX_DEPTH for place, _ in found):
        reason = f"it expands to more than {_MAX_VALUES:,} values, or for one that contains itself"
        yield ConfigError(str(origin), reason, _FIX_OF_A_FORGERY)
        return
    rejected = _check_values(found, typed, origin)
    # once, of a section that others refer to
    yield from _gather([*{str(mistake): mistake for mistake in rejected}.values()], typed, origin)


def list_untrusted(config: Mapping[str, Any], typed: Sequence[str], origin: Path) -> list[str]:
    """Return the overrides without which a folder's config is rejected for the code that it names.

    Args:
        config: Composed config, plain values.
        typed: Other overrides of the command line.
        origin: Source of the config.
    """
    rejected = _check_values(list(_walk(config)), typed, origin)
    return list(dict.fromkeys(mistake.word for mistake in rejected if isinstance(mistake, _CodeError)))


def _gather(mistakes: Sequence[ConfigError], typed: Sequence[str], origin: Path) -> Iterator[ConfigError]:
    """Yield the mistakes, with one in place of those that are about code: all of it is typed in one line."""
    code = [mistake for mistake in mistakes if isinstance(mistake, _CodeError)]
    missing = {mistake.missing_package for mistake in code} - {None}
    for mistake in mistakes:
        if mistake is (code[0] if code else None):
            setting, reason, fix = mistake.setting, mistake.reason, mistake.fix
            words = [mistake.word for mistake in code]
            if len(code) > 1:
                setting = " ".join(mistake.setting for mistake in code)
                reason = f"{origin} sets them, and {_CODE}: no file in conf/ names them there"
                fix = f"{' '.join(map(for_shell, words))} if you trust it"
            if missing:
                packages = sorted(map(str, missing))
                reason += f"; no package {' and '.join(packages)} is found here"
                place = f"PYTHONPATH={locate_code(packages)}"
                if find_resumed_run(typed) is None:
                    fix = f"{place} before the same command, and {fix}"
                else:
                    fix = f"{place} {type_command(' '.join(map(for_shell, [*typed, *words])))} if you trust it"
            yield ConfigError(setting, reason, fix)
        elif not isinstance(mistake, _CodeError):
            yield mistake


def _check_values(found: Sequence[tuple[Place, Any]], typed: Sequence[str], origin: Path) -> Iterator[ConfigError]:
    admitted = _read_admitted(find_trusted_folders(typed))
    typed_values = dict(_list_typed(typed))
    for place, value in found:
        if isinstance(value, Mapping):
            yield from _check_node(place, value, admitted, typed_values, origin)
            yield from _check_file(place, value, admitted, typed_values, origin)
        is_known = (place, value) in admitted.texts if isinstance(value, str) else False
        if _is_written_elsewhere(place, value) and not is_known and not _is_typed(place, value, typed_values):
            why = "a folder may not choose the files, repositories and shell commands that are written outside of it"
            yield _reject(place, value, why, origin)
        if _names_tasks(place, value) and not _is_typed(_to_original(place), value, typed_values):
            yield _reject(place, value, "a folder may not choose tasks: their YAML files may run code", origin)


def _check_node(
    place: Place,
    node: Mapping[str, Any],
    admitted: _Admitted,
    typed_values: Mapping[Place, tuple[object, ...]],
    origin: Path,
) -> Iterator[ConfigError]:
    special = [str(key) for key in node if str(key).startswith("_")]
    if not special:
        return
    target = node[TARGET] if TARGET in node else None
    is_partial = bool(node[PARTIAL]) if PARTIAL in node else False
    place = _to_original(place)
    places = [place, _as_option(place)]
    places += [(*place[:1], _ANY, *place[2:])] if len(place) > 1 else []
    is_known = isinstance(target, str) and any((known, target, is_partial) in admitted.nodes for known in places)
    if not is_known and not _is_typed((*place, TARGET), target, typed_values):
        group = place[0] if place else ""
        rejected = _reject((*place, TARGET), target, f"{_CODE}: no file in conf/{group} names it there", origin)
        try:
            read_signature(str(target))
            yield _CodeError(rejected)
        except TargetNotFoundError as error:
            if error.missing_package is not None:
                yield _CodeError(rejected, error.missing_package)
            else:  # typed, it would be rejected as well
                reason = f"{rejected.reason}, and none can ({error})"
                yield ConfigError(rejected.setting, reason, _FIX_OF_A_FORGERY)
    for key in special:
        if key not in (TARGET, PARTIAL):
            where = ".".join([*place, key])
            yield ConfigError(f"{where}=…", f"{origin} sets it, but the config has no such key", _FIX_OF_A_FORGERY)


def _check_file(
    place: Place,
    node: Mapping[str, Any],
    admitted: _Admitted,
    typed_values: Mapping[Place, tuple[object, ...]],
    origin: Path,
) -> Iterator[ConfigError]:
    """Check that a Python file that a node executes is named by a trusted file or the command line."""
    argument = RUNS_FILE.get(str(node.get(TARGET)))
    if argument is None or node.get(argument) is None:
        return
    where, value = (*_to_original(place), argument), node[argument]
    is_known = (where, value) in admitted.texts or ((where[0], _ANY, *where[2:]), value) in admitted.texts
    if not is_known and not _is_typed(where, value, typed_values):
        yield _CodeError(_reject(where, value, _CODE, origin))


def _as_option(place: Place) -> Place:
    """Map a place within a mixture source, an `eval_data` entry or a frozen model to one in conf/data or conf/model."""
    for named in (("data", "sources"), ("eval_data",)):
        if place[: len(named)] == named and len(place) > len(named):
            return ("data", *place[len(named) + 1 :])
    is_model = bool(place) and is_place_of_model(place[0]) and not (CONF / place[0]).is_dir()
    return ("model", *place[1:]) if is_model else place


def _reject(place: Place, value: object, reason: str, origin: Path) -> ConfigError:
    setting = f"{'.'.join(place)}={to_grammar(value)}"
    return ConfigError(setting, f"{origin} sets it, and {reason}", f"{for_shell(f'++{setting}')} if you trust it")


def _is_written_elsewhere(place: Place, value: object) -> bool:
    """Return whether a value is written into a shell script, or names a file outside the run folder."""
    if _to_original(place)[:1] == ("mode",):
        return place[-1] in ("path", "output", "push_to") and value is not None
    if len(place) != 2 or place[0] != "launcher" or place[1] == TARGET:
        return False
    return not _WORD.fullmatch(value) if isinstance(value, str) else bool(value) and isinstance(value, list | Mapping)


def _names_tasks(place: Place, value: object) -> bool:
    """Return whether a value names an evaluation task or a folder of tasks."""
    section, *rest = _to_original(place) or ("",)
    is_task = "tasks" in rest and not isinstance(value, list) and value != "???"
    return section == "evaluator" and (is_task or (rest[-1:] == ["task_folder"] and value is not None))


def _to_original(place: Place) -> Place:
    """Map a place in a section that refers to another one to that one, where it is set on the command line."""
    for copy, original in COPIES.items():
        if place[: len(copy)] == copy:
            return (*original, *place[len(copy) :])
    return place


def _is_typed(place: Place, value: object, typed_values: Mapping[Place, tuple[object, ...]]) -> bool:
    """Return whether a value was given on the command line, as a whole or key by key."""
    if value in typed_values.get(place, ()):
        return True
    if not isinstance(value, Mapping) or not value:
        return False
    return all(_is_typed((*place, str(key)), child, typed_values) for key, child in value.items())


def _walk(value: object, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every value with its place, parents first, up to one more than a config may have."""
    waiting: list[tuple[Place, Any]] = [(place, value)]
    for _ in range(_MAX_VALUES + 1):
        if not waiting:
            return
        place, value = waiting.pop()
        yield place, value
        if isinstance(value, Mapping) and len(place) <= _MAX_DEPTH:
            waiting += [((*place, str(key)), child) for key, child in reversed([*value.items()])]
        elif isinstance(value, list) and len(place) <= _MAX_DEPTH:
            waiting += [((*place, str(index)), child) for index, child in reversed([*enumerate(value)])]


def _read_admitted(folders: Sequence[Path]) -> _Admitted:
    """Read the constructors and strings in the YAML files of some folders; 20 ms for conf/."""
    nodes: set[tuple[Place, str, bool]] = set()
    texts: set[tuple[Place, str]] = set()
    for folder in folders:
        for file, text in read_yaml_files(folder):
            if TARGET not in text:
                continue
            root = yaml.load(text, Loader=_READER)
            prefix = _get_prefix(file.relative_to(folder), text)
            is_of_named_nodes = len(prefix) == 1 and TARGET not in root
            for place, value in _walk(root):
                full = (*prefix, _ANY, *place[1:]) if is_of_named_nodes else (*prefix, *place)
                if isinstance(value, str):
                    texts.add((full, value))
                elif isinstance(value, dict) and TARGET in value:
                    nodes.add((full, value[TARGET], PARTIAL in value and value[PARTIAL]))
    for place, text in texts:  # tokenizer: ${tokenizer}
        if match := _REFERENCE.fullmatch(text):
            source = tuple(match[1].split("."))
            below = [known for known in nodes if known[0][: len(source)] == source]
            nodes |= {((*place, *known[len(source) :]), target, is_partial) for known, target, is_partial in below}
    return _Admitted(nodes=nodes, texts=texts)


def _get_prefix(file: Path, text: str) -> Place:
    """Return the section that a file's values belong to: its group, unless the file names another package."""
    match = _PACKAGE.search(text)
    if match is None:
        return file.parent.parts
    return () if match[1] == "_global_" else tuple(match[1].split("."))


def _list_typed(typed: Sequence[str]) -> Iterator[tuple[Place, tuple[object, ...]]]:
    """Yield every command-line value with its place, also as text: where text is set, `3` and `[a]` are names.

    Sections and lists are expanded.
    """
    for override in parse_values(typed):
        place, text = tuple(override.key_or_group.split(".")), str(override.input_line).partition("=")[2]
        for where, value in _walk(override.value(), place):
            yield where, (value, text) if where == place else (value,)
