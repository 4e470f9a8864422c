"""Check that a resumed run has the same model, adapter and tokenizer as its weights were trained with."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.config.check.types import to_setting
from recipes.config.resolved import ResolvedRun
from recipes.config.traits import WEIGHT_KEYS, read_adapter, read_free_at_resume, read_settings_of_weights
from recipes.errors import ConfigError
from recipes.run_folder import (
    CONFIG_FILE,
    TOKENIZER_FOLDER,
    find_run_folder,
    has_checkpoint,
    read_config,
    read_json,
)

# settings of an adapter that change neither the shapes of its weights nor what they compute
_NOT_OF_ADAPTER = ("_target_", "pretrained", "dropout", "init")


def check_resumed(run: ResolvedRun) -> Iterator[ConfigError]:
    """Reject a model, adapter or tokenizer that differs from the one the weights were trained with.

    `resume=auto` takes all settings from the command line: what is not typed there is one mistake, however much of the
    run's it is not.
    """
    found = [*_find_differences(run)]
    if run.mode.needs_checkpoint:  # which trains no other model
        found = [ConfigError(each.setting, each.reason, each.fix.partition(", or resume=null")[0]) for each in found]
    keys = {override.lstrip("+~").partition("=")[0] for override in run.typed}
    untyped = [mistake for mistake in found if mistake.setting.partition(" ")[2].partition("=")[0] not in keys]
    if run.resume != "auto" or not untyped:
        yield from found
        return
    first, num_more = untyped[0], len(untyped) - 1
    more = f", and {num_more} more of its settings {'is' if num_more == 1 else 'are'} not typed" if num_more else ""
    yield ConfigError(
        first.setting, f"{first.reason}{more}", f"resume={run.run_folder}, which takes the run's settings"
    )
    yield from (mistake for mistake in found if mistake not in untyped)


def _find_differences(run: ResolvedRun) -> Iterator[ConfigError]:
    """Yield each difference of the model, adapter and tokenizer from those that the weights were trained with.

    Settings that only refer to `model.name` follow a published model that has been moved, and nobody has typed them.
    """
    config, choices, references = run.config, run.choices, run.references
    trained = _read_trained(run.resume, run.run_folder)
    if trained is None:
        return
    before, now = trained["model"], config["model"]
    if before.get("_target_") != now.get("_target_"):
        name = str(before.get("_target_")).rpartition(".")[2]
        yield ConfigError(
            f"resume={config['resume']} {_name('model', now, choices)}",
            f"its weights are those of {name}",
            _leave_out(run, "model=", "train another model"),
        )
        return
    theirs, ours = read_settings_of_weights(before), read_settings_of_weights(now)
    keys = {override.lstrip("+~").partition("=")[0] for override in run.typed}
    free = {key for key in read_free_at_resume(now) if f"model.{key}" in keys}
    for key, value in ours.items():
        trained_with = theirs.get(key)
        is_garbled = isinstance(trained_with, str) and not isinstance(value, str)  # by an edit of the file
        if value != trained_with and key not in free and not is_garbled:
            yield ConfigError(
                f"resume={config['resume']} model.{key}={to_setting(value)}",
                f"its weights were trained with model.{key}={to_setting(trained_with)}",
                _leave_out(run, f"model.{key}", "train another model"),
            )
    yield from _check_adapter(run, trained["adapter"])
    for key in WEIGHT_KEYS:
        pretrained = now.get(key)
        is_typed = f"model.{key}" not in references
        if is_typed and pretrained not in (None, before.get(key)) and not _is_adapter(trained["adapter"]):
            yield ConfigError(
                f"resume={config['resume']} model.{key}={pretrained}",
                "its weights are those of the checkpoint, and no others would be read",
                _leave_out(run, f"model.{key}", "start from these weights"),
            )
    # tokens prepared elsewhere (data=token_file) come without a tokenizer and cannot be compared
    known, chosen = trained["tokenizer"], config["tokenizer"]
    if known and chosen and known != chosen and not _is_saved(chosen, known, trained["folder"], references):
        named = chosen.get("name") if known.get("_target_") == chosen.get("_target_") else None
        typed = _name("tokenizer", chosen, choices) if named is None else f"tokenizer.name={named}"
        yield ConfigError(
            f"resume={config['resume']} {typed}",
            f"its weights were trained with the token ids of {_describe(known)}, not of {_describe(chosen)}",
            _leave_out(run, f"{typed.partition('=')[0]}=", "train with another one"),
        )


def _is_saved(chosen: Mapping[str, Any], known: Mapping[str, Any], run: Path, references: Mapping[str, str]) -> bool:
    """Return whether a tokenizer has the ids of the one in the run folder, which a resume takes in any case."""
    differing = [key for key in chosen.keys() | known.keys() if chosen.get(key) != known.get(key)]
    if all(f"tokenizer.{key}" in references for key in differing):
        return True
    folders = (Path(os.path.expanduser(str(chosen.get("name", "")))), run / TOKENIZER_FOLDER)
    try:
        ours, theirs = (read_json(folder / "tokenizer.json", fix="") for folder in folders)
    except (ConfigError, ValueError):  # of a name with a NUL
        return False
    return ours == theirs


def _check_adapter(run: ResolvedRun, before: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Reject another adapter, or one whose settings give its weights another meaning, such as their scale."""
    config, choices = run.config, run.choices
    resume, now = config["resume"], config.get("adapter") or {}
    if _is_adapter(before) != _is_adapter(now) or (_is_adapter(now) and before.get("_target_") != now.get("_target_")):
        kind = str(before.get("_target_")).rpartition(".")[2]
        yield ConfigError(
            f"resume={resume} {_name('adapter', now, choices)}",
            f"its weights are those of {kind}"
            if _is_adapter(before)
            else "its weights were trained without an adapter",
            _leave_out(run, "adapter=", "train another model"),
        )
        return
    for key in before.keys() & now.keys() - {*_NOT_OF_ADAPTER} if _is_adapter(now) else ():
        if before[key] != now[key]:
            yield ConfigError(
                f"resume={resume} adapter.{key}={to_setting(now[key])}",
                f"its weights were trained with adapter.{key}={to_setting(before[key])}",
                _leave_out(run, f"adapter.{key}", "train another model"),
            )


def _leave_out(run: ResolvedRun, setting: str, purpose: str) -> str:
    """Return what to type in place of a setting that the checkpoint contradicts; a mode that trains may start anew."""
    return f"the same command without {setting}" + (f", or resume=null to {purpose}" if run.mode.trains else "")


def _is_adapter(node: Mapping[str, Any]) -> bool:
    return read_adapter(node) is not None


def _name(group: str, node: Mapping[str, Any], choices: Mapping[str, str]) -> str:
    """Return the override that chose an option, or the constructor in its place."""
    return f"{group}={choices[group]}" if group in choices else f"{group}._target_={node.get('_target_')}"


def _read_trained(resume: object, run_folder: Path) -> dict[str, Any] | None:
    """Return folder, model, adapter and tokenizer of the run whose weights are loaded; None if there are none."""
    if resume == "auto":
        run = run_folder if has_checkpoint(run_folder) else None
    else:
        run = None if resume is None else find_run_folder(Path(str(resume)))
    if run is None or not (run / CONFIG_FILE).is_file():
        return None
    try:
        frozen = read_config(run)
    except ConfigError:
        return None  # reported where the run is composed from it; `auto` composes from the command line alone
    if not isinstance(frozen.get("model"), dict):
        return None
    adapter = frozen.get("adapter")
    is_known = isinstance(adapter, dict)
    tokenizer = frozen.get("tokenizer")
    return {
        "folder": run,
        "model": frozen["model"],
        "adapter": adapter if is_known else {},
        "tokenizer": tokenizer if isinstance(tokenizer, dict) else None,
    }


def _describe(tokenizer: Mapping[str, Any]) -> str:
    settings = [f"{key}={to_setting(value)}" for key, value in tokenizer.items() if key != "_target_"]
    name = str(tokenizer.get("_target_")).rpartition(".")[2]
    return f"{name}({', '.join(settings)})" if settings else name
