"""Check the overrides typed, each by itself: those that Hydra cannot compose, with the nearest name that exists."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipes.config.cached_compose import compose_options
from recipes.config.check.deepspeed import misplaced_offload
from recipes.config.check.nodes import PROVIDED
from recipes.config.check.renamed import (
    RENAMED_OPTIONS,
    answer_renamed_option,
    answer_renamed_setting,
)
from recipes.config.check.sections import CONF, SETTINGS
from recipes.config.compose import (
    MODE_OF_SWEEPS,
    Composed,
    compose_run,
    parse_override,
    quote_options,
)
from recipes.config.signature import TargetNotFoundError, read_signature
from recipes.errors import ConfigError

# raised for a broken file under conf/
_UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError)
# common names of a precision or a strategy -> option
_OPTION_ALIASES = {
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "16": "16-mixed",
    "fp32": "32-true",
    "32": "32-true",
    "fsdp2": "fsdp",
    "deepspeed": "deepspeed_stage_2",
    "zero1": "deepspeed_stage_1",
    "zero2": "deepspeed_stage_2",
    "zero3": "deepspeed_stage_3",
}
# a strategy's name typed as a recipe -> the recipe for a modern GPU
_RECIPE_ALIASES = {name: f"{name}_bf16" for name in ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")}
# common names of settings elsewhere -> setting
_SETTING_ALIASES = {
    "batch_size": "global_batch_size",
    "learning_rate": "optimizer.lr",
    "gpus": "trainer.devices",
    "steps": "trainer.max_steps",
    "epochs": "trainer.max_steps",
    "max_epochs": "trainer.max_steps",
    "checkpoint_every": "save_every",
    "ckpt_path": "resume",
}
# settings that no other single setting replaces -> what to type
_REPLACED = {
    "strategy.offload": "strategy=fsdp strategy.cpu_offload=true, or strategy=deepspeed_stage_2_offload",
}


def compose_overrides(
    overrides: Sequence[str], *, config_folder: Path = CONF, config_name: str = "config"
) -> tuple[Composed | None, list[ConfigError]]:
    """Compose a run, or as much of it as can be composed, and report every override that cannot.

    An argument that a node's target accepts but its YAML does not list (`trainer.benchmark=true`) is added.

    Returns:
        The run composed without the wrong overrides, None if even that fails; and the mistakes.
    """
    overrides = quote_options(overrides)
    where: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
    try:
        return compose_run(overrides, **where), []
    except (*_UNREADABLE, ConfigError) as error:
        first = error
    try:
        good, mistakes = _split_valid(overrides, config_folder, config_name)
    except _UNREADABLE as error:
        return None, [_explain_broken_file(error)]
    try:
        composed = compose_run(good, **where)
    except (HydraException, ConfigError) as error:
        last = error if isinstance(error, ConfigError) else _explain_broken_file(error)
        return None, [*mistakes, last] if good != list(overrides) or not mistakes else mistakes
    if not mistakes and good == list(overrides):
        mistakes = [_explain_broken_file(first)]
    return composed, mistakes


def _split_valid(overrides: Sequence[str], folder: Path, name: str) -> tuple[list[str], list[ConfigError]]:
    """Split overrides into those that compose, corrected where the meaning is plain, and mistakes."""
    good: list[str] = []
    values: list[tuple[str, Override]] = []
    mistakes: list[ConfigError] = []
    for typed in overrides:
        override, quoted = _parse(typed)
        if override is None:
            mistakes.append(ConfigError(quoted, "it is not key=value", "key=value"))
            continue
        group = CONF / override.key_or_group
        if folder == CONF and group.is_dir() and not override.is_delete():
            mistake = _find_unknown_option(override, quoted)
            mistakes += [mistake] if mistake else []
            good += [] if mistake else [quoted]
        else:
            values.append((quoted, override))
    accepts_sweeps = MODE_OF_SWEEPS in overrides
    # the keys that a value may be typed for: those of the chosen options
    config = compose_options(good, folder, name)
    for typed, override in values:
        corrected = _correct(typed, override, config)
        if override.is_sweep_override() and corrected == typed and not accepts_sweeps:
            fix = f"python train.py -m {typed}"
            corrected = ConfigError(typed, "a single run takes one value", fix)
        if isinstance(corrected, ConfigError):
            mistakes.append(corrected)
        else:
            good.append(corrected)
    return good, mistakes


def _parse(typed: str) -> tuple[Override | None, str]:
    """Parse an override; a value that Hydra's grammar cannot read, `mode.prompt=f(x`, is quoted.

    Returns:
        The override, None if it is not `key=value`; and its text, quoted where needed.
    """
    key, equals, value = typed.partition("=")
    escaped = value.replace("'", "\\'")
    for text in (typed, f"{key}='{escaped}'") if equals else (typed,):
        try:
            return parse_override(text), text
        except HydraException:
            continue
    return None, typed


def _find_unknown_option(override: Override, typed: str) -> ConfigError | None:
    group = override.key_or_group
    options = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    value = override.value()
    chosen = value if isinstance(value, list) else [value]
    unknown = [str(option) for option in chosen if str(option) not in options]
    if not unknown:
        return None
    if renamed := answer_renamed_option(typed):
        return renamed
    if override.is_sweep_override():
        return ConfigError(typed, "a single run takes one option", f"python train.py -m {typed}")
    aliases = _RECIPE_ALIASES if group == "recipe" else _OPTION_ALIASES
    alias = aliases.get(unknown[0])
    near = [alias] if alias in options else get_close_matches(unknown[0], options, 1, cutoff=0.5)
    fix = f"{group}={near[0]}" if near else f"{group}=<option>"
    return ConfigError(typed, f"the options are {' '.join(options)}", fix)


def _correct(typed: str, override: Override, config: Any) -> str | ConfigError:
    """Return the override, with `+` where the target accepts the argument, or the mistake in it."""
    if override.is_add() or override.is_force_add():
        return typed
    node, section, missing = _find_deepest(config, override.key_or_group.split("."))
    if not missing:
        return typed
    names = [str(name) for name in node if not str(name).startswith("_") and name != "hydra"]
    target = OmegaConf.select(node, "_target_") if OmegaConf.is_dict(node) else None
    if isinstance(target, str):
        try:
            signature = read_signature(target)
        except TargetNotFoundError:
            return typed
        if len(missing) == 1 and (missing[0] in signature.parameters or signature.takes_any):
            return f"+{typed}"
        path = ".".join(section)
        if path == "strategy" and not override.is_delete():
            offload = misplaced_offload(node, ".".join(missing), override.value(), typed)
            if offload is not None:
                return offload
        provided = PROVIDED.get(path, set())
        names += [name for name in signature.parameters if name not in {*names, *provided}]
    elif not section:
        names = [*SETTINGS, *names, *_list_groups()]
    if renamed := answer_renamed_setting(typed):
        return renamed
    fix = _find_fix(override, typed, config, section, missing, list(dict.fromkeys(names)))
    return ConfigError(typed, f"there is no {override.key_or_group!r}", fix)


def _find_fix(
    override: Override,
    typed: str,
    config: Any,
    section: list[str],
    missing: list[str],
    names: list[str],
) -> str:
    """Return what to type instead of a key that does not exist.

    Args:
        override: The override as parsed.
        typed: The override as text.
        config: All keys there are.
        section: Parts of the key that exist.
        missing: Parts of the key that do not exist.
        names: Names in that section.
    """
    value = typed.partition("=")[2]
    wrong = missing[-1]
    owners = [str(name) for name in config if OmegaConf.is_dict(config[name]) and wrong in config[name]]
    if override.key_or_group in _REPLACED:
        fix = _REPLACED[override.key_or_group]
    elif wrong in _SETTING_ALIASES:
        fix = f"{_SETTING_ALIASES[wrong]}={value}"
    elif not section and owners and owners != ["hydra"]:
        fix = f"{owners[0]}.{wrong}={value}"
    else:
        fix = _find_nearest(section, missing, names, value)
    if override.is_delete() and not fix.startswith("nothing"):
        fix = f"'~{fix.removesuffix('=')}'"
    return fix


def _find_deepest(config: Any, parts: list[str]) -> tuple[Any, list[str], list[str]]:
    """Return the deepest section on the way to a key, the parts that lead to it, and those that do not exist."""
    node = config
    for index, part in enumerate(parts):
        if part not in node:
            return node, parts[:index], parts[index:]
        child = node._get_node(part)
        if index + 1 < len(parts) and not OmegaConf.is_dict(child):
            return node, parts[:index], parts[index:]
        node = child
    return node, parts, []


def _find_nearest(section: list[str], missing: list[str], names: list[str], value: str) -> str:
    """Return the nearest name, else the option that adds the key, else the names there are."""
    wrong, *below = missing
    near = get_close_matches(wrong, [name for name in names if name != wrong], 3)
    if near:
        near.sort(key=lambda name: not (CONF / name / f"{value}.yaml").is_file())
        return f"{'.'.join([*section, near[0], *below])}={value}"
    if (CONF.joinpath(*section) / f"{wrong}.yaml").is_file():
        return f"+{'/'.join(section)}={wrong}, which adds it"
    if not section:
        return "python train.py --help for the list of settings"
    offered = " ".join(f"{'.'.join([*section, name])}=" for name in names)
    return f"one of {offered}" if offered else f"nothing for {'.'.join([*section, *missing])}"


def _list_groups() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def _explain_broken_file(error: BaseException) -> ConfigError:
    """Return the message of Hydra or the YAML reader with its causes: the innermost names the file."""
    messages = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        messages.append(str(error))
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    reason = " ".join(dict.fromkeys(lines))
    unknown = re.search(r"Could not find '(\w+)/(\w+)'", reason)
    if unknown and unknown[2] in RENAMED_OPTIONS.get(unknown[1], {}):
        group, old = unknown.groups()
        now = RENAMED_OPTIONS[group][old]
        reason = f"{lines[0].partition(':')[0]}: `{group}={old}` is now `{group}={now}`"
        return ConfigError("a file under conf/", reason, f"{group}: {now} in that file")
    return ConfigError("a file under conf/", reason, "a correction of that file")
