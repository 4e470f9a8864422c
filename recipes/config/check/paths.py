"""Check paths and folders that must exist before a run starts, by name and size; no file is opened."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.checkpoint.retention import resolve_symlink
from recipes.config.compose import cluster_job_name
from recipes.config.local_path import find_address
from recipes.config.resolved import ResolvedRun
from recipes.config.traits import list_data, list_nodes
from recipes.data.found_files import describe_missing
from recipes.data.glob_files import expand_glob
from recipes.errors import ConfigError, shell, type_setting
from recipes.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    EVENTS_FILE,
    LOG_FILE,
    METRICS_FILE,
    RUN_FOLDERS,
    SAMPLES_FILE,
    TOKENIZER_FOLDER,
    check_metrics,
    find_foreign,
    find_links_out,
    find_run_folder,
    find_wrong_kind,
    has_checkpoint,
    has_run,
    is_renamed,
    is_special,
    read_events,
    read_samples,
)

_SOURCES = "recipes.data."
_OF_STORES = tuple(f"{_SOURCES}{module}." for module in ("token_shards", "image_shards", "image_text"))
_PROTOCOL = "://"  # of a data set or a bucket, which only its own library finds
_OF_MODEL = re.compile(r"\+*(model|recipe|hydra\.searchpath)[=.]")  # what is typed says which model is meant
_NEWEST = ("last", "latest", "newest", "best", "true", "yes", "continue")  # of other projects
# settings of any section that name a folder or file of this machine
_LOCAL = ("cache_dir", "nvme_path", "output", "task_folder")


def check_paths(run: ResolvedRun, overrides: Sequence[str]) -> Iterator[ConfigError]:
    """Check the path of the data, the folder to resume from and the run folder.

    Args:
        run: The run.
        overrides: Overrides typed on this command line.
    """
    for section, node in list_data(run.config) if run.reads_data else ():
        yield from _check_data_path(section, node)
    yield from _check_addresses(run.config)
    yield from _check_cache(run.config)
    if not find_address("resume", run.resume):
        yield from _check_resume(run, overrides)
    if run.mode.trains and has_run(run.run_folder):
        yield from _check_run_files(run.run_folder)
    yield from check_run_folder(run)


def _check_addresses(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Reject addresses of buckets and hubs as folders and files of this machine."""
    runs = config["mode"].get("runs")
    places = [("resume", config["resume"]), *(("mode.runs", run) for run in (runs if isinstance(runs, list) else ()))]
    places += [
        (f"{section}.{name}", node.get(name)) for section, node in list_nodes(config) for name in node if name in _LOCAL
    ]
    places += [("mode.path", config["mode"].get("path"))]
    for key, path in dict.fromkeys((key, path) for key, path in places if isinstance(path, str)):
        if address := find_address(key, path):
            yield address


def _check_cache(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Reject an empty cache folder, which is that of an empty RECIPES_CACHE unless it was typed."""
    empty = [section for section, node in list_nodes(config) if node.get("cache_dir") == ""]
    if empty and os.environ.get("RECIPES_CACHE") == "":
        fix = f"RECIPES_CACHE=<folder> before the command, or {empty[0]}.cache_dir=<folder>"
        yield ConfigError("RECIPES_CACHE=", "it is empty, and names the folder of the caches", fix)
    else:
        for section in empty:
            yield ConfigError(f"{section}.cache_dir=", "it is empty", f"{section}.cache_dir=<folder>")


def _check_data_path(section: str, data: Mapping[str, Any]) -> Iterator[ConfigError]:
    for name in ("path", "val_path"):
        path = data.get(name)
        if not isinstance(path, str):
            continue
        if _PROTOCOL in path:
            yield from _check_protocol(section, name, data)
            continue
        expanded = os.path.expanduser(path)  # unlike Path's, it accepts a user that does not exist
        if not os.path.exists(expanded) and next(expand_glob(expanded), None) is None:
            setting = f"{section}.{name}={path}"
            several = [part.strip(" '\"") for part in path.strip("[]").split(",")]
            if len(several) == 1 and several[0] != path and os.path.exists(several[0]):
                yield ConfigError(setting, "it takes a path, not a list", f"{section}.{name}={several[0]}")
                continue
            if len(several) > 1 and all(map(os.path.exists, several)):
                folder, suffix = os.path.commonpath(several), os.path.splitext(several[0])[1]
                inside = "" if all(os.path.dirname(part) == folder for part in several) else "**/"
                fix = f"'{section}.{name}={folder}/{inside}*{suffix}', which reads all of that name"
                yield ConfigError(setting, f"it takes one path, and these are {len(several)}", fix)
                continue
            yield ConfigError(setting, describe_missing(Path(expanded)), f"{section}.{name}=<a path that exists>")


def _check_protocol(section: str, name: str, data: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Reject an address, which few sources of data read."""
    path, target = str(data[name]), str(data.get("_target_"))
    if not target.startswith(_SOURCES) or target.startswith(_OF_STORES):
        return
    setting, key = f"{section}.{name}={path}", f"{section}.{name}"
    protocol, _, rest = path.partition(_PROTOCOL)
    option = "data" if section == "data" else f"+data@{section}"
    reads_hub = "split" in data  # of a dataset there
    reason = "it is an address, and this data= reads files on disk"
    if protocol.lower() == "file":
        yield ConfigError(setting, reason, f"{key}={rest}")
    elif protocol.lower() == "hf" and (protocol != "hf" or not rest):
        reason = "it names no dataset" if not rest else "a dataset of the hub begins with hf://"
        yield ConfigError(setting, reason, f"{key}=hf://{rest or '<id of a dataset>'}")
    elif target.startswith(f"{_SOURCES}token_file."):
        yield ConfigError(setting, reason, f"{key}=<a copy on disk>, or {option}=token_shards {key}={path}")
    elif protocol == "hf" and not reads_hub:
        reader = "image_table" if target.startswith(f"{_SOURCES}image_") else "documents"
        yield ConfigError(setting, reason, f"{option}={reader} {key}={path}")
    elif protocol != "hf":
        yield ConfigError(setting, reason, f"{key}=<a copy on disk>")


def _check_resume(run: ResolvedRun, overrides: Sequence[str]) -> Iterator[ConfigError]:
    resume, mode = run.resume, run.mode.name
    if resume in (None, "auto"):
        if run.mode.needs_checkpoint and resume is None and run.awaited is None:
            yield ConfigError(f"mode={mode}", "it needs a checkpoint", f"mode={mode} resume=<run folder>")
        if run.mode.needs_checkpoint and run.awaited is not None and not run.awaited.saves:
            reason = f"it needs a checkpoint, and {run.awaited.name} saves none"
            yield ConfigError(f"mode={mode}", reason, f"save_every=auto for {run.awaited.name}")
        if resume == "auto" and not _is_repeatable(overrides):
            yield ConfigError(
                "resume=auto",
                "each start of this command creates a new run folder, so there is nothing to resume",
                "resume=auto hydra.run.dir=<folder>",
            )
        return
    folder = Path(resume)
    if os.path.lexists(folder):  # unlike Path's methods, false for a name that is too long
        folder = resolve_symlink(folder) or folder
    above = next((place for place in folder.parents if has_checkpoint(place)), None)
    of_run = None if above is None else type_setting("resume", above)
    fix = of_run or "resume=<a run folder or a checkpoint>"
    if os.path.isfile(folder):
        yield ConfigError(f"resume={resume}", "it is a file, not the folder of a run", fix)
    elif not os.path.isdir(folder):  # unlike Path.is_dir, false for a name that is too long
        if resume.lower() in _NEWEST:
            fix = "resume=auto" if _is_repeatable(overrides) else "resume=auto hydra.run.dir=<the folder of the run>"
        yield ConfigError(f"resume={resume}", "there is no such folder", fix)
    elif not (folder / "manifest.json").is_file() and not has_checkpoint(folder):
        yield _explain_no_checkpoint(resume, folder, above)
    elif find_run_folder(folder) is None and not any(map(_OF_MODEL.match, overrides)):
        place = folder if has_checkpoint(folder) else folder.parent.parent
        yield ConfigError(
            f"resume={resume}",
            f"{place / CONFIG_FILE} is missing, and nothing else says which model its weights are of",
            f"a copy of the {CONFIG_FILE} that the run wrote, in {place}, or the same command with the model= and all"
            " other settings of that run",
        )


def _explain_no_checkpoint(resume: str, folder: Path, above: Path | None) -> ConfigError:
    """Return the error for a folder that is neither a run with a checkpoint nor a checkpoint.

    Args:
        resume: As it was typed.
        folder: The folder.
        above: The run that it is in; None if it is in none.
    """
    reason = "it contains no valid checkpoint"
    fix = "resume=<a run that saved one>" if above is None else type_setting("resume", above)
    if above is not None and folder.name == CHECKPOINTS:
        reason = "it is the folder of all checkpoints, not of one or of the run"
    elif os.path.isfile(folder / "adapter_config.json"):
        reason = "it holds an adapter of peft, not a checkpoint of a run"
        if above is None:
            fix = f"adapter=<lora or ia3> {type_setting('adapter.pretrained', resume)} with its model, and"
            fix += " without resume"
    elif os.path.isfile(folder / "config.json"):
        reason = "it holds a published model, not a checkpoint of a run"
        if above is None:
            fix = f"model=huggingface {type_setting('model.name', resume)}, without resume"
    elif above is None and (folder / LOG_FILE).is_file():
        reason = "the run in it has saved no checkpoint, so there is no step to go on from"
        fix = "the command that started it, without resume"
    return ConfigError(f"resume={resume}", reason, fix)


def _check_run_files(run: Path) -> Iterator[ConfigError]:
    """Check the files that a run continues, of an earlier start in its folder, before it replaces any others."""
    try:
        check_metrics(run / METRICS_FILE)
        read_events(run / EVENTS_FILE)
        read_samples(run / SAMPLES_FILE)
    except ConfigError as mistake:
        yield mistake


def _check_links(run: ResolvedRun) -> Iterator[ConfigError]:
    """Reject links through which this mode would write, or from which it would copy.

    In a downloaded folder a link may point to anything of this user's. A link in place of the run's checkpoints is
    allowed, as they may be on another disk, unless it leads to those of another run.
    """
    run_folder = run.run_folder
    resumed = None if run.resume in (None, "auto") else find_run_folder(Path(run.resume))
    if resumed is not None and resumed.resolve() != run_folder.resolve():
        for path in find_links_out(resumed, (TOKENIZER_FOLDER,)):
            yield _reject_copy(f"resume={run.resume}", path, resumed)
    try:
        entries = sorted(run_folder.iterdir())
    except OSError:  # not there yet; or whoever locks it reports why it cannot be used
        return
    written = () if run.mode.writes is None or run.config["mode"].get("path") else (run.mode.writes,)
    folders = RUN_FOLDERS if run.mode.trains else (TOKENIZER_FOLDER, *written)
    links = [path for path in entries if path.is_symlink() and not path.is_dir() and not is_renamed(path)]
    links += [path for path in entries if not path.is_symlink() and is_special(path)]
    links += find_links_out(run_folder, folders)
    saved = run_folder / CHECKPOINTS
    if saved.is_symlink() and run.mode.trains and has_run(saved.resolve().parent):
        links += [] if saved.resolve().parent == run_folder.resolve() else [saved]
    is_resumed = resumed is not None and not any(text.startswith("hydra.run.dir=") for text in run.typed)
    setting = f"resume={run.resume}" if is_resumed else f"hydra.run.dir={run_folder}"
    for path in links:
        inside = path.relative_to(run_folder)
        if inside.parts[0] == TOKENIZER_FOLDER:
            yield _reject_copy(setting, path, run_folder)
            continue
        kind = f"a link to {os.readlink(path)}" if path.is_symlink() else "neither a file nor a folder"
        yield ConfigError(
            setting,
            f"{inside} is {kind}, where this run would write",
            f"{shell('rm', path)}, or hydra.run.dir=<another folder>",
        )


def _reject_copy(setting: str, path: Path, folder: Path) -> ConfigError:
    """Return the error for a link in a tokenizer folder, whose files are copied into a new run or an export."""
    inside = path.relative_to(folder)
    if not path.is_symlink() or not path.exists():
        kind = f"a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "not a regular file"
        return ConfigError(
            setting, f"{inside} is {kind}", f"a copy of the {TOKENIZER_FOLDER} folder that the run wrote"
        )
    reason = f"{inside} is a link to {os.readlink(path)}, where this run would copy from it"
    copy = f"{shell('rm', path)} && {shell('cp -r', path.resolve(), path)}"
    return ConfigError(setting, reason, f"{copy}, if you trust it")


def _is_repeatable(overrides: Sequence[str]) -> bool:
    """Return whether the same command gets the same run folder again: typed, or keyed by a cluster job."""
    typed = any(override.startswith("hydra.run.dir=") for override in overrides)
    return typed or cluster_job_name() is not None


def _check_files(run: ResolvedRun) -> Iterator[ConfigError]:
    """Reject a folder in which a run would replace what is not a run's, such as a project's own config.yaml."""
    if not run.mode.trains:
        return
    run_folder = run.run_folder
    fix = "hydra.run.dir=<another folder>"
    if (foreign := find_foreign(run_folder)) is not None:
        reason = f"it holds {foreign.name}, which is of no run, and which this run would replace"
        yield ConfigError(f"hydra.run.dir={run_folder}", reason, fix)
    elif (path := find_wrong_kind(run_folder)) is not None:
        kinds = "a folder, and this run writes a file" if path.is_dir() else "a file, and this run makes a folder"
        reason = f"{path.name} in it is {kinds} of that name"
        yield ConfigError(f"hydra.run.dir={run_folder}", reason, f"{shell('mv', path)} <another name>, or {fix}")


def check_run_folder(run: ResolvedRun) -> Iterator[ConfigError]:
    """Reject a run that would overwrite another run's folder; check again once the folder is locked."""
    run_folder, resume = run.run_folder, run.resume
    if str(run_folder).startswith("~"):
        yield ConfigError(f"hydra.run.dir={run_folder}", "there is no such user", "hydra.run.dir=<a folder>")
    if in_the_way := [*_check_links(run)] or [*_check_files(run)]:
        yield from in_the_way
        return
    used = any(os.path.exists(run_folder / name) for name in (METRICS_FILE, CHECKPOINTS))
    if run.continues or not used or not run.mode.trains or resume == "auto":
        return
    # a run folder, a checkpoint in it, or one whose run has no config.yaml
    resumed = None if resume is None else find_run_folder(Path(resume)) or Path(resume)
    if resumed is None or not resumed.resolve().is_relative_to(run_folder.resolve()):
        typed, again = f"resume={resume} ", type_setting("resume", run_folder)
        if resume is None:  # the same command again, whose settings are those of the run
            typed, again = "", f"resume=auto {type_setting('hydra.run.dir', run_folder)}"
        yield ConfigError(
            f"{typed}hydra.run.dir={run_folder}",
            "the folder contains a run, which this one would overwrite",
            f"{again} to resume it, or hydra.run.dir=<another folder>",
        )
