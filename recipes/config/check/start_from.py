"""Check the run that `start_from=` names: that it is there, and that its weights mean the same in this run."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.checkpoint.retention import resolve_symlink
from recipes.config.check.types import to_setting
from recipes.config.local_path import find_address
from recipes.config.resolved import Awaited, ResolvedRun
from recipes.config.start_from import find_source, read_source, read_source_adapter
from recipes.config.traits import (
    WEIGHT_KEYS,
    read_adapter,
    read_free_at_resume,
    read_new_head_with,
    read_settings_of_weights,
    read_task,
)
from recipes.errors import ConfigError, for_shell, type_setting
from recipes.run_folder import (
    CHECKPOINTS,
    TOKENIZER_FOLDER,
    find_links_out,
    find_run_folder,
    has_checkpoint,
    read_json,
)

# settings of an adapter that change neither the shapes of its weights nor what they compute
NOT_OF_ADAPTER = ("_target_", "pretrained", "lora_dropout", "init")


def check_start_from(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check `start_from`; nothing of it where the run goes on from a checkpoint of its own."""
    typed = {override.lstrip("+~").partition("=")[0]: override for override in run.typed}
    start_from, weights = typed.get("start_from"), typed.get("start_from_weights")
    if weights is not None and run.start_from is None:
        reason = "there is no run to start from, so it has no effect"
        yield ConfigError(weights, reason, f"start_from=<run folder> {weights}, or the same command without it")
    if run.start_from is None:
        return
    if run.resume not in (None, "auto"):
        if start_from is not None:
            yield ConfigError(
                f"{start_from} resume={run.resume}",
                "a run that is continued has its own weights, and one that starts from another run is a new one",
                "the same command without start_from, or without resume",
            )
        return
    if run.awaited is not None:
        yield from _check_awaited(run, run.awaited)
        return
    source = find_source(run.config, run.run_folder)
    if source is None or (not run.mode.takes_steps and not run.mode.trains):
        return
    yield from _check_pretrained(run)
    if mistake := find_address("start_from", run.start_from) or _find_fault(run, source):
        yield mistake
        return
    folder = find_run_folder(source)
    if folder is None:
        return  # the checkpoint is compared with the model when it is read
    for path in find_links_out(folder, (TOKENIZER_FOLDER,)):
        reason = f"{path.relative_to(folder)} is a link to {os.readlink(path)}, where this run would copy from it"
        yield ConfigError(f"start_from={run.start_from}", reason, f"start_from=<a copy of {folder} without links>")
    try:
        before, adapter = read_source(folder), read_source_adapter(folder)
    except ConfigError as mistake:
        yield mistake
        return
    if before:
        yield from _check_model(run, before)
        yield from _check_adapter(run, adapter)
        yield from _check_tokenizer(run, before.get("tokenizer"), folder)


def _check_awaited(run: ResolvedRun, before: Awaited) -> Iterator[ConfigError]:
    """Check a run against the config of the one that it is to start from, which has no folder yet."""
    yield from _check_pretrained(run)
    if not before.saves:
        reason = "that run saves no checkpoint"
        yield ConfigError(f"start_from={before.name}", reason, "save_every=auto for it, or start_from=null")
    yield from _check_model(run, before.config)
    adapter = before.config.get("adapter") or {}
    yield from _check_adapter(run, adapter if read_adapter(adapter) is not None else None)
    if "name" not in (run.config["tokenizer"] or {}):  # the files of one are compared once that run has written its own
        yield from _check_tokenizer(run, before.config.get("tokenizer"), run.run_folder)


def _check_pretrained(run: ResolvedRun) -> Iterator[ConfigError]:
    """Reject two sources of the first weights."""
    for key in WEIGHT_KEYS:
        pretrained = run.config["model"].get(key)
        if f"model.{key}" not in run.references and pretrained is not None:
            yield ConfigError(
                f"start_from={run.start_from} model.{key}={pretrained}",
                "both name the first weights of the model",
                f"the same command without model.{key}, or without start_from",
            )


def _find_fault(run: ResolvedRun, source: Path) -> ConfigError | None:
    """Return why a path is no run with a checkpoint, and no checkpoint."""
    setting = f"start_from={run.start_from}"
    folder = (resolve_symlink(source) or source) if os.path.lexists(source) else source
    if os.path.isfile(folder):
        return ConfigError(
            setting, "it is a file, not the folder of a run", "start_from=<a run folder or a checkpoint>"
        )
    if not os.path.isdir(folder):
        return ConfigError(setting, "there is no such folder", "start_from=<a run folder or a checkpoint>")
    own = find_run_folder(folder) or folder
    if own.resolve() == run.run_folder.resolve():
        return ConfigError(
            setting, "it is the folder of this run, which it would overwrite", type_setting("resume", run.start_from)
        )
    if (folder / "manifest.json").is_file() or has_checkpoint(folder):
        return None
    above = next((place for place in folder.parents if has_checkpoint(place)), None)
    if above is not None and folder.name == CHECKPOINTS:
        reason = "it is the folder of all checkpoints, not of one or of the run"
        return ConfigError(setting, reason, type_setting("start_from", above))
    if os.path.isfile(folder / "adapter_config.json"):
        fix = f"adapter=<lora or ia3> {type_setting('adapter.pretrained', run.start_from)}, without start_from"
        return ConfigError(setting, "it holds an adapter of peft, not a checkpoint of a run", fix)
    if os.path.isfile(folder / "config.json"):
        fix = f"{type_setting('model.pretrained', run.start_from)}, without start_from"
        return ConfigError(setting, "it holds a published model, not a checkpoint of a run", fix)
    return ConfigError(setting, "it contains no valid checkpoint", "start_from=<a run that saved one>")


def _check_model(run: ResolvedRun, source: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Reject another model, or settings with which its weights compute something else. More tokens may be added."""
    before, now = source["model"], run.config["model"]
    if before.get("_target_") != now.get("_target_"):
        of_source, own = (str(node.get("_target_")).rpartition(".")[2] for node in (before, now))
        shown = f"model={run.choices['model']}" if "model" in run.choices else f"model._target_={now.get('_target_')}"
        yield ConfigError(
            f"start_from={run.start_from} {shown}",
            f"its weights are those of {of_source}, and this model is {own}",
            "the model= and model.… of that run, or start_from=null to train another model",
        )
        return
    theirs, ours = read_settings_of_weights(before), read_settings_of_weights(now)
    typed = {override.lstrip("+~").partition("=")[0] for override in run.typed}
    free = {key for key in read_free_at_resume(now) if f"model.{key}" in typed}
    free |= {*run.task.unused_model_settings, *_read_unused(source), *read_new_head_with(now)}
    different = {
        key: theirs.get(key)
        for key, value in ours.items()
        if value != theirs.get(key) and key not in free and not _has_grown(key, theirs.get(key), value)
    }
    if different:
        shown = " ".join(f"model.{key}={to_setting(ours[key])}" for key in different)
        then = " ".join(_type(f"model.{key}", value) for key, value in different.items())
        yield ConfigError(
            f"start_from={run.start_from} {shown}",
            f"its weights were trained with {' '.join(f'model.{k}={to_setting(v)}' for k, v in different.items())}",
            f"{then}, or start_from=null to train another model",
        )


def _read_unused(source: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings of a run's model for a part that its task has replaced."""
    task = source.get("task")
    is_ours = isinstance(task, Mapping) and str(task.get("_target_")).startswith("recipes.task.")
    return read_task(task).unused_model_settings if isinstance(task, Mapping) and is_ours else ()


def _type(key: str, value: object) -> str:
    """Return a setting as it is typed in a shell."""
    return type_setting(key, value) if isinstance(value, str) else for_shell(f"{key}={to_setting(value)}")


def _has_grown(key: str, before: object, now: object) -> bool:
    return key == "vocab_size" and isinstance(before, int) and isinstance(now, int) and now > before


def _check_adapter(run: ResolvedRun, before: Mapping[str, Any] | None) -> Iterator[ConfigError]:
    """Reject another adapter than that of the source: it is either kept as it was, or merged with adapter=none."""
    now = run.config.get("adapter") or {}
    if before is None or read_adapter(now) is None:
        return
    shown = f"start_from={run.start_from} adapter={run.adapter}"
    if now.get("pretrained") is not None:
        yield ConfigError(
            f"start_from={run.start_from} adapter.pretrained={now['pretrained']}",
            "both name the first weights of the adapter",
            "the same command without adapter.pretrained, or start_from=<a run without an adapter>",
        )
    if before.get("_target_") != now.get("_target_"):
        reason = f"its weights are those of {read_adapter(before)} beside frozen ones"
        yield ConfigError(shown, reason, f"adapter={read_adapter(before)}, or adapter=none, which merges it")
        return
    for key in before.keys() & now.keys() - {*NOT_OF_ADAPTER}:
        if before[key] != now[key]:
            yield ConfigError(
                f"{shown} adapter.{key}={to_setting(now[key])}",
                f"its adapter was trained with adapter.{key}={to_setting(before[key])}",
                f"adapter.{key}={to_setting(before[key])}, or adapter=none, which merges it",
            )


def _check_tokenizer(run: ResolvedRun, before: object, folder: Path) -> Iterator[ConfigError]:
    """Reject a typed tokenizer whose ids mean something else than those that the weights were trained with."""
    now = run.config["tokenizer"]
    is_typed = any(text.lstrip("+~").startswith(("tokenizer=", "tokenizer.")) for text in run.typed)
    if not is_typed or not isinstance(before, Mapping) or not before or not now or before == now:
        return
    saved = folder / TOKENIZER_FOLDER
    chosen = Path(os.path.expanduser(str(now.get("name", ""))))
    if (vocabularies := read_vocabularies(saved, chosen)) is not None:
        theirs, ours = vocabularies
        if all(ours.get(token) == number for token, number in theirs.items()):
            return  # the same, or more tokens behind them
    typed = f"tokenizer.name={now['name']}" if "name" in now else f"tokenizer={run.choices.get('tokenizer', '…')}"
    yield ConfigError(
        f"start_from={run.start_from} {typed}",
        "its weights were trained with other token ids",
        "the same command without tokenizer, which takes that of the run",
    )


def read_vocabularies(*folders: Path) -> list[dict[str, int]] | None:
    """Return the ids of each tokenizer's tokens; None if one is not in a folder of this machine."""
    found = []
    for folder in folders:
        try:
            content: Any = read_json(folder / "tokenizer.json", fix="")
            vocabulary = content["model"]["vocab"]
            added = {str(each["content"]): int(each["id"]) for each in content.get("added_tokens", ())}
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if not isinstance(vocabulary, dict):
            return None
        found.append({**vocabulary, **added})
    return found
