"""File names and readers for the files in a run folder; `recipes.files` writes them."""

import csv
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError, shell
from recipes.files import describe, probe, write_atomically
from recipes.foreign_file import describe_error, reading
from recipes.home import reject_address

ANSWERS_FILE = "answers.jsonl"
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
EVENTS_FILE = "events.jsonl"
LOCK_FILE = ".lock"
LOG_FILE = "train.log"
METRICS_FILE = "metrics.csv"
PAGE_FILE = "report.html"
PICTURE_FILE = "curves.png"
PIPELINE_FILE = "pipeline.json"
PLAN_FILE = "plan.json"
SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"
SWEEP_FILE = "sweep.csv"
EVALUATIONS = "evaluations"  # field of the summary that mode=evaluate writes
CHECKPOINTS = "checkpoints"
EXPORT_FOLDER = "export"
EXPORT_RECORD = "export.json"  # in it: of which run it is, and what its model is
OOM_FOLDER = "oom"
PROFILE_FOLDER = "profile"
ROLLED_BACK_FOLDER = "rolled_back"
SPIKES_FOLDER = "spikes"
TOKENIZER_FOLDER = "tokenizer"

FROZEN = "# Run it again: "  # begins CONFIG_FILE
HOLDS_LOCK = "process"  # begins LOCK_FILE
PAGE_MARK = '<meta name="generator" content="lightning-recipes">'  # of each page that callbacks/report writes
# what a run replaces; it only appends to its log, which may have been there before: `python train.py … | tee`
_REPLACED: tuple[str, ...] = (CONFIG_FILE, ENVIRONMENT_FILE, EVENTS_FILE, METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE)
_REPLACED += (
    ANSWERS_FILE,
    PICTURE_FILE,
    PAGE_FILE,
    TOKENIZER_FOLDER,
    SPIKES_FOLDER,
    ROLLED_BACK_FOLDER,
    OOM_FOLDER,
    PROFILE_FOLDER,
)
RUN_FOLDERS = (TOKENIZER_FOLDER, SPIKES_FOLDER, ROLLED_BACK_FOLDER, OOM_FOLDER, PROFILE_FOLDER)
_HEAD_BYTES = 1 << 10
_MOST_BYTES = 64 << 20  # a larger file is none that a mode writes
# a YAML file of ten lines can expand to billions of values, or contain itself
MOST_VALUES, MOST_DEPTH = 100_000, 50
_CONFLICT_MARKERS = ("<<<<<<< ", ">>>>>>> ")
_MOST_DIGITS = 18  # of a step
_MOST_CELL = 10_000  # characters in a cell of metrics.csv; the reader of the standard library stops at 131,072

IsOwn = Callable[[str], bool]  # text of a file -> whether the mode that is about to replace it wrote it


def create_new(folder: Path, *, stem: str) -> Path:
    """Create and return a new folder; if it exists, append the next free number to `stem`."""
    for number in itertools.count(2):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            folder = folder.with_name(f"{stem}_{number}")
        else:
            break
    return folder


def claim_output(
    path: str | Path,
    setting: str,
    *,
    is_file: bool = False,
    is_new_folder: bool = False,
    replaces: Mapping[str, IsOwn] | IsOwn | None = None,
) -> Path:
    """Return the folder or file that a mode writes at its end; create its folder and check that it takes files.

    Call it before the work: what could not be kept at the end would be found only then.

    Args:
        path: As set; `~` is the home folder.
        setting: Its key, for the error message.
        is_file: Whether `path` names a file, whose folder is created.
        is_new_folder: Whether it names a folder that the mode itself creates, in the one that is created here.
        replaces: Whether the text of a file that is there is of this mode, which then replaces it; by name for the
            files of a folder. Any other file is in the way. None: the caller has looked.

    Raises:
        ConfigError: The disk is full, the folder cannot be created or written to, or a file of others is in the way.
    """
    reject_address(path, setting)
    target = Path(os.path.expanduser(path))  # unlike Path's, it accepts a user that does not exist
    kind = "file" if is_file else "folder"
    if str(path) == "":  # Path would be the working directory
        raise ConfigError(f"{setting}=", f"it names no {kind}", f"{setting}=<a {kind}>")
    if str(target).startswith("~"):
        raise ConfigError(f"{setting}={path}", "there is no such user", f"{setting}=<a {kind}>")
    folder = target.parent if is_file or is_new_folder else target
    try:
        if is_file and target.is_dir():
            raise ConfigError(f"{setting}={path}", "it is a folder, and a file is written", f"{setting}={path}/<name>")
        folder.mkdir(parents=True, exist_ok=True)
        probe(folder)
    except OSError as error:
        is_in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        place = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        reason = describe_in_the_way(place) if is_in_the_way else describe(error)
        fix = f"{setting}=<a {kind} of yours on a disk with space>"
        if place.is_symlink() and not place.exists():
            fix = f"{shell('mkdir -p', place.resolve())}, then the same command"
        raise ConfigError(f"{setting}={path}", f"it cannot be written to: {reason}", fix) from error
    owners = replaces or {}
    for file, is_own in [(target, owners)] if callable(owners) else [(folder / name, owners[name]) for name in owners]:
        if not may_replace(file, is_own):
            reason = f"{file} is there, and this mode has not written it: it would be replaced"
            raise ConfigError(f"{setting}={path}", reason, f"{setting}={find_free_name(target)}")
    return target


def describe_in_the_way(path: Path) -> str:
    """Describe what stands where a folder should be."""
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {os.readlink(path)}, which does not exist"
    return f"{path} is a file, not a folder"


def may_replace(file: Path, is_own: IsOwn) -> bool:
    """Return whether nothing is lost if a mode writes a file: there is none, an empty one, its own, or a device."""
    try:
        if not file.exists():
            return True
        if not file.is_file():
            return not file.is_dir()
        size = file.stat().st_size
        return size == 0 or (size <= _MOST_BYTES and is_own(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):  # not UTF-8, not JSON
        return False


def is_page(text: str) -> bool:
    """Return whether a text is a page of this project."""
    return PAGE_MARK in text[:_HEAD_BYTES]


def has_keys(*keys: str) -> IsOwn:
    """Return a function that recognizes the JSON of a mode by keys that each such file has."""

    def is_own(text: str) -> bool:
        content = json.loads(text)
        return isinstance(content, dict) and content.keys() >= set(keys)

    return is_own


def is_summary(text: str) -> bool:
    """Return whether a text is that of a summary.json: of a run that has ended, or with evaluations alone."""
    return has_keys("status")(text) or has_keys(EVALUATIONS)(text)


def find_free_name(path: Path) -> Path:
    """Return a path beside this one that nothing has, with a number in its name."""
    names = (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in itertools.count(2))
    return next(name for name in names if not os.path.lexists(name))


def has_run(folder: Path) -> bool:
    """Return whether a run of this project has started in a folder: what it finds there is its own."""
    if not os.path.isdir(folder):  # unlike Path.is_dir, false for a name that is too long
        return False
    if has_checkpoint(folder):
        return True
    if (folder / LOG_FILE).is_file() and _read_head(folder / LOCK_FILE).startswith(HOLDS_LOCK):
        return True  # it was started; a sweep locks its folder, too, and has another log
    # a copy without hidden files
    is_frozen = _read_head(folder / CONFIG_FILE).startswith(FROZEN)
    return is_frozen and any((folder / name).is_file() for name in (EVENTS_FILE, METRICS_FILE))


def find_foreign(folder: Path) -> Path | None:
    """Return a file or folder that a run would replace in a folder that is no run's; None if there is none."""
    if has_run(folder):
        return None
    return next((folder / name for name in _REPLACED if os.path.lexists(folder / name)), None)


def find_wrong_kind(folder: Path) -> Path | None:
    """Return a file where a run has a folder, or a folder where it has a file; None if there is none."""
    files = [name for name in (*_REPLACED, LOG_FILE, LOCK_FILE) if name not in RUN_FOLDERS]
    wrong = [folder / name for name in files if os.path.isdir(folder / name)]
    wrong += [folder / name for name in (CHECKPOINTS, *RUN_FOLDERS) if os.path.isfile(folder / name)]
    return wrong[0] if wrong else None


def find_links_out(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield the links that lead out of a run folder, and pipes and devices, at and below the folders of these names.

    In a downloaded folder such a link may point to any folder of this user's: nothing is written through it or copied
    from it. A named pipe blocks whoever opens it.
    """
    home = os.path.realpath(folder)
    for name in names:
        paths = [folder / name]
        if not paths[0].is_symlink():
            paths += [Path(place, entry) for place, *found in os.walk(paths[0]) for entry in itertools.chain(*found)]
        for path in paths:
            leads_out = path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(home)
            if leads_out or is_special(path):
                yield path


def is_special(path: Path) -> bool:
    """Return whether a path is a named pipe, a socket or a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


def is_renamed(path: Path) -> bool:
    """Return whether a link in a run folder leads to a file beside it that no run writes."""
    target = Path(os.path.realpath(path))
    is_beside = target.parent == Path(os.path.realpath(path.parent))
    return is_beside and target.is_file() and target.name not in (*_REPLACED, LOG_FILE, LOCK_FILE)


def _read_head(path: Path) -> str:
    """Return the beginning of a regular file as text; empty if there is none that can be read."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES).decode(errors="replace")
    except OSError:
        return ""


def find_run_folder(path: Path) -> Path | None:
    """Return `path` if it is a run folder, or the run folder that contains the checkpoint `path`; None otherwise."""
    linked = [Path(os.path.realpath(path)).parent.parent] if os.path.islink(path) else []
    for candidate in (path, path.parent.parent, *linked):
        if os.path.isfile(candidate / CONFIG_FILE):  # unlike Path.is_file, returns False if the name is too long
            return candidate
    return None


def has_checkpoint(run_folder: Path) -> bool:
    """Return whether a run folder has a complete checkpoint; its hashes are not verified."""
    folder = run_folder / CHECKPOINTS
    # a tool that knows no links may have copied `last` alone
    return any(next(folder.glob(f"{name}/manifest.json"), None) for name in ("step_*.ckpt", "last", "best"))


# Each reader raises a ConfigError that names the file, the problem and the fix: people edit these files, copy them
# incompletely and open them in spreadsheets.


def read_config(run_folder: Path) -> dict[str, Any]:
    """Read the frozen config, without the `hydra` node.

    Raises:
        ConfigError: The file cannot be read, or is not a YAML mapping.
    """
    import yaml

    path = run_folder / CONFIG_FILE
    fix = f"a copy of the {CONFIG_FILE} that the run wrote, or a new run without this folder"
    text = _read_text(path, fix)
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, if available

    class Loader(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line, name = key.start_mark.line + 1, str(key.value)
                if name != "<<" and lines.setdefault(name, line) != line:
                    reason = f"line {line} sets {name} again, after line {lines[name]}"
                    raise ConfigError(str(path), reason, f"{path} with one of the two lines")
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    with reading(path, str(path), fix):  # dates that do not exist, lists as keys, deeper than Python's stack
        try:
            config = yaml.load(text, Loader=Loader)
        except yaml.YAMLError as error:
            raise _explain_yaml(path, text, error, fix) from error
    if not isinstance(config, dict):
        raise ConfigError(str(path), f"it {_describe(config)}, not settings", fix)
    if not is_bounded(config):
        reason = f"it expands to more than {MOST_VALUES:,} values, or for one that contains itself"
        raise ConfigError(str(path), reason, "a folder written by a run")
    return {key: value for key, value in config.items() if key != "hydra"}


def _explain_yaml(path: Path, text: str, error: Any, fix: str) -> ConfigError:
    """Return the error for a text that is no YAML, with the line in which its reader stopped."""
    lines = text.splitlines()
    marked = next((number for number, line in enumerate(lines, 1) if line.startswith(_CONFLICT_MARKERS)), None)
    if marked is not None:
        reason = f"line {marked} is a conflict marker of git: {lines[marked - 1]}"
        return ConfigError(str(path), reason, f"{path} with one side of each conflict and without the markers")
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = "" if mark is None else f" in line {mark.line + 1}"
    said = " ".join(str(problem or error).split())
    return ConfigError(str(path), f"it is not valid YAML{where}: {said}", fix)


def is_bounded(value: object) -> bool:
    """Return whether plain values, each repeated one counted again, are as many and as deep as a config may be."""
    waiting: list[tuple[object, int]] = [(value, 0)]
    for _ in range(MOST_VALUES):
        if not waiting:
            return True
        value, depth = waiting.pop()
        if isinstance(value, Mapping | list):
            if depth == MOST_DEPTH or len(waiting) + len(value) > MOST_VALUES:
                return False
            children = value.values() if isinstance(value, Mapping) else value
            waiting += [(child, depth + 1) for child in children]
    return not waiting


def read_environment(run_folder: Path) -> dict[str, Any]:
    """Read environment.json.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    path = run_folder / ENVIRONMENT_FILE
    return read_json(path, fix=f"{shell('rm', path)}, and the run resumes from its {CONFIG_FILE} alone")


def read_summary(run_folder: Path) -> dict[str, Any] | None:
    """Read summary.json; return None if the run has not ended.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    path = run_folder / SUMMARY_FILE
    return read_json(path, fix=f"{shell('rm', path)}, and the run counts as not ended") if path.is_file() else None


def add_evaluations(run_folder: Path, evaluations: Mapping[str, Mapping[str, Any]]) -> None:
    """Add evaluation results to summary.json, keeping its other fields.

    Args:
        run_folder: Folder of a run, finished or not.
        evaluations: Split or task -> checkpoint and metrics; replaces earlier results of the same name.

    Raises:
        ConfigError: summary.json exists but cannot be read.
        OSError: summary.json cannot be written.
    """
    summary = read_summary(run_folder) or {}
    earlier = summary.get(EVALUATIONS)
    added = {name: {key: _for_json(value) for key, value in found.items()} for name, found in evaluations.items()}
    summary[EVALUATIONS] = (earlier if isinstance(earlier, dict) else {}) | added
    # a run that is still training, and other evaluations of it, may write the same file now
    write_atomically(run_folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n", is_shared=True)


def _for_json(value: Any) -> Any:
    """Return `value`, or None for NaN and inf, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, *, fix: str) -> dict[str, Any]:
    """Read a file with one JSON object.

    Args:
        path: File to read.
        fix: What to type if the file is damaged.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    text = _read_text(path, fix)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"invalid JSON: {describe_error(error)}" if text.strip() else "it is empty"
        raise ConfigError(str(path), reason, fix) from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), f"it {_describe(content)}, not an object", fix)
    return content


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file (events.jsonl, samples.jsonl), skipping blank lines; empty if there is no file.

    Raises:
        ConfigError: A line is not a JSON object.
    """
    return [read_json_line(line, number, path) for number, line in enumerate(complete_lines(path), 1) if line.strip()]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read events.jsonl; empty if there is no file.

    Raises:
        ConfigError: A line is not an event.
    """
    events = read_json_lines(path)
    for number, event in enumerate(events, 1):
        has_time = isinstance(event.get("time", 0), int | float)
        if not isinstance(event.get("event"), str) or type(event.get("step")) is not int or not has_time:
            reason = f"event {number} of it has no name, step and time: {json.dumps(event)[:60]}"
            raise ConfigError(str(path), reason, _fix_line(path))
    return events


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Read samples.jsonl; empty if there is no file.

    Raises:
        ConfigError: A line is not a sample.
    """
    samples = read_json_lines(path)
    for number, sample in enumerate(samples, 1):
        has_texts = all(isinstance(sample.get(key), str) for key in ("prompt", "text"))
        if not has_texts or type(sample.get("step")) is not int:
            reason = f"sample {number} of it has no step, prompt and text: {json.dumps(sample)[:60]}"
            raise ConfigError(str(path), reason, _fix_line(path))
    return samples


def read_json_line(line: str, number: int, path: Path) -> dict[str, Any]:
    """Parse one line of a JSON Lines file.

    Raises:
        ConfigError: The line is not a JSON object.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            str(path), f"line {number} is not valid JSON: {describe_error(error)}", _fix_line(path)
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), f"line {number} {_describe(content)}, not an object", _fix_line(path))
    return content


def _fix_line(path: Path) -> str:
    return f"the file without that line, or {_move_away(path)}"


def check_metrics(path: Path) -> None:
    """Check that every row of a metrics.csv is a later step with numbers; does nothing if there is no file.

    Raises:
        ConfigError: Another program has rewritten the file.
    """
    lines = list(complete_lines(path))
    _check_steps(lines, path)
    steps = [int(line.partition(",")[0]) for line in lines[1:] if line.strip()]
    for number, (before, step) in enumerate(itertools.pairwise(steps), start=3):
        if step <= before:  # rows after a checkpoint are cut off the end
            raise ConfigError(str(path), f"line {number} is of step {step}, after step {before}", _fix_metrics(path))
    for number, line in enumerate(lines[1:], start=2):
        try:
            for cell in line.rstrip("\r\n").split(","):
                float(cell or 0)
        except ValueError as error:
            raise ConfigError(
                str(path), f"line {number} of it has a cell that is not numeric: {error}", _fix_metrics(path)
            ) from error


def read_cells(path: Path) -> list[dict[str, str]]:
    """Read the rows of a metrics.csv as text, including empty cells; empty if there is no file.

    Raises:
        ConfigError: Another program has rewritten the file.
    """
    lines = list(complete_lines(path))
    _check_steps(lines, path)
    return list(csv.DictReader(lines))


def read_rows(path: Path) -> list[dict[str, float]]:
    """Read the rows of a metrics.csv as numbers, skipping empty cells; empty if there is no file.

    Raises:
        ConfigError: Another program has rewritten the file.
    """
    rows = read_cells(path)
    try:
        return [as_numbers(row) for row in rows]
    except (ValueError, TypeError) as error:
        raise ConfigError(str(path), f"one of its cells is not a number: {error}", _fix_metrics(path)) from error


def as_numbers(row: dict[str, str]) -> dict[str, float]:
    """Convert a row of text cells to numbers, skipping empty cells."""
    return {name: float(cell) for name, cell in row.items() if cell}


def complete_lines(path: Path) -> Iterable[str]:
    """Return the complete lines of a text file; a killed run may leave an incomplete last line.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    if not path.is_file():
        return []
    lines = _read_text(path, _move_away(path)).splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def _read_text(path: Path, fix: str) -> str:
    try:
        if path.exists() and not path.is_file():  # a FIFO would block
            raise ConfigError(str(path), "it is not a regular file", fix)
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"byte {error.start} of it is not UTF-8 text", fix) from error
    except OSError as error:
        raise ConfigError(str(path), f"it cannot be read: {error.strerror}", fix) from error


def _check_steps(lines: list[str], path: Path) -> None:
    """Check the first column, which spreadsheets change: `;` as separator, a byte order mark, 1.0 instead of 1.

    Blank lines at the end, which editors leave, are none.
    """
    num_lines = max((number for number, line in enumerate(lines, start=1) if line.strip()), default=0)
    lines = lines[:num_lines]
    for number, line in enumerate(lines, start=1):
        if len(line) > _MOST_CELL and max(map(len, line.split(","))) > _MOST_CELL:
            reason = f"line {number} has a cell of more than {_MOST_CELL:,} characters"
            raise ConfigError(str(path), reason, _fix_metrics(path))
    columns = next(csv.reader(lines[:1]), [])
    num_columns = len(columns)
    repeated = next((name for name in columns if columns.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(str(path), f"two of its columns are named {repeated[:60]}", _fix_metrics(path))
    for number, line in enumerate(lines, start=1):
        first = line.strip().partition(",")[0]
        if number == 1 and first != "step":
            raise ConfigError(str(path), f"its first column is {first[:60]!r}, not step", _fix_metrics(path))
        if number > 1 and not (first.isascii() and first.isdecimal() and len(first) <= _MOST_DIGITS):
            raise ConfigError(str(path), f"line {number} begins with {first[:60]!r}, not a step", _fix_metrics(path))
        if number > 1 and (num_cells := line.count(",") + 1) != num_columns:
            reason = f"line {number} has {num_cells} cells, not {num_columns}"
            raise ConfigError(str(path), reason, _fix_metrics(path))


def _fix_metrics(path: Path) -> str:
    return f"a copy that no other program has saved, or {_move_away(path)}: the run then begins a new one"


def _move_away(path: Path) -> str:
    return shell("mv", path, f"{path}.old")


def _describe(content: object) -> str:
    """Describe the content of a file that does not hold a mapping."""
    if content is None:
        return "is empty"
    return f"holds a {'list' if isinstance(content, list) else 'single value'}"
