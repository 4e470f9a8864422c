"""What was typed, one override at a time: every one that Hydra cannot compose, with the nearest name that exists."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipes.config.check.deepspeed import misplaced_offload
from recipes.config.check.nodes import PROVIDED
from recipes.config.check.sections import CONF, SETTINGS
from recipes.config.compose import Composed, compose_run, parse_override, quote_options
from recipes.config.signature import TargetNotFoundError, read_signature
from recipes.errors import ConfigError

# what a broken file under conf/ raises
_UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError)
# what people type for a precision or a strategy, and the option that means it
_ALIASES = {
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
# the recipe that a strategy's name alone means: what a modern GPU takes
_RECIPES = {
    name: f"{name}_bf16" for name in ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
}


# what people type at the top level, and the word that means it
_MEANT = {
    "batch_size": "global_batch_size",
    "learning_rate": "optimizer.lr",
    "gpus": "trainer.devices",
    "steps": "trainer.max_steps",
    "epochs": "trainer.max_steps",
    "max_epochs": "trainer.max_steps",
    "checkpoint_every": "save_every",
    "ckpt_path": "resume",
}


# what no other key with the same value says
_SAID_OTHERWISE = {
    "strategy.offload": "strategy=fsdp strategy.cpu_offload=true, or strategy=deepspeed_stage_2_offload",
}


def compose_typed(
    overrides: Sequence[str], *, config_folder: Path = CONF, config_name: str = "config"
) -> tuple[Composed | None, list[ConfigError]]:
    """Compose a run, or as much of it as can be, and report every override that cannot.

    An argument that a node's target takes but its YAML does not list (`trainer.benchmark=true`) is added.

    Returns:
        The run composed without the bad overrides (None if not even that can be), and the mistakes.
    """
    overrides = quote_options(overrides)
    where: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
    try:
        return compose_run(overrides, **where), []
    except (*_UNREADABLE, ConfigError) as error:
        first = error
    try:
        good, mistakes = _sift(overrides, where)
    except _UNREADABLE as error:
        return None, [_as_mistake(error)]
    try:
        composed = compose_run(good, **where)
    except (HydraException, ConfigError) as error:
        left = error if isinstance(error, ConfigError) else _as_mistake(error)
        return None, [*mistakes, left] if good != list(overrides) or not mistakes else mistakes
    if not mistakes and good == list(overrides):
        mistakes = [_as_mistake(first)]
    return composed, mistakes


def _sift(overrides: Sequence[str], where: dict[str, Any]) -> tuple[list[str], list[ConfigError]]:
    """Split into overrides that compose (mended where the meaning is plain) and mistakes."""
    good: list[str] = []
    values: list[tuple[str, Override]] = []
    mistakes: list[ConfigError] = []
    for as_typed in overrides:
        override, typed = _parse(as_typed)
        if override is None:
            mistakes.append(ConfigError(typed, "it is no key=value", "key=value"))
            continue
        group = CONF / override.key_or_group
        if where["config_folder"] == CONF and group.is_dir() and not override.is_delete():
            mistake = _unknown_option(override, typed)
            mistakes += [mistake] if mistake else []
            good += [] if mistake else [typed]
        else:
            values.append((typed, override))
    config = _skeleton(good, where)
    for typed, override in values:
        mended = _mend(typed, override, config)
        if isinstance(mended, ConfigError):
            mistakes.append(mended)
        else:
            good.append(mended)
    return good, mistakes


def _parse(typed: str) -> tuple[Override | None, str]:
    """An override and how to write it: text that Hydra's grammar cannot read, `mode.prompt=f(x`, is quoted."""
    key, equals, value = typed.partition("=")
    escaped = value.replace("'", "\\'")
    for written in (typed, f"{key}='{escaped}'") if equals else (typed,):
        try:
            return parse_override(written), written
        except HydraException:
            continue
    return None, typed


def _skeleton(group_overrides: list[str], where: dict[str, Any]) -> Any:
    """The config of the chosen groups alone, unresolved: the keys that values may be typed for."""
    with initialize_config_dir(str(where["config_folder"].resolve()), version_base="1.3"):
        return compose(where["config_name"], group_overrides, return_hydra_config=True)


def _unknown_option(override: Override, typed: str) -> ConfigError | None:
    options = sorted(path.stem for path in (CONF / override.key_or_group).glob("*.yaml"))
    value = override.value()
    chosen = value if isinstance(value, list) else [value]
    wrong = [str(option) for option in chosen if str(option) not in options]
    if not wrong:
        return None
    if override.is_sweep_override():
        return ConfigError(typed, "a single run takes one option", f"python train.py -m {typed}")
    aliases = _RECIPES if override.key_or_group == "recipe" else _ALIASES
    alias = aliases[wrong[0]] if wrong[0] in aliases else None
    near = [alias] if alias in options else get_close_matches(wrong[0], options, 1, cutoff=0.5)
    listed = " ".join(options)
    fix = f"{override.key_or_group}={near[0]}" if near else f"{override.key_or_group}=<option>"
    return ConfigError(typed, f"the options are {listed}", fix)


def _mend(typed: str, override: Override, config: Any) -> str | ConfigError:
    """The override as it is, with `+` where the target takes the argument, or the mistake in it."""
    if override.is_add() or override.is_force_add():
        return typed
    node, known_parts, missing = _deepest(config, override.key_or_group.split("."))
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
        section = ".".join(known_parts)
        if section == "strategy" and not override.is_delete():
            offload = misplaced_offload(node, ".".join(missing), override.value(), typed)
            if offload is not None:
                return offload
        provided = PROVIDED[section] if section in PROVIDED else set()
        names += [name for name in signature.parameters if name not in {*names, *provided}]
    elif not known_parts:
        names = [*SETTINGS, *names, *_groups()]
    value = typed.partition("=")[2]
    wrong = missing[-1]
    homes = [
        str(name) for name in config if OmegaConf.is_dict(config[name]) and wrong in config[name]
    ]
    if override.key_or_group in _SAID_OTHERWISE:
        fix = _SAID_OTHERWISE[override.key_or_group]
    elif wrong in _MEANT:
        fix = f"{_MEANT[wrong]}={value}"
    elif not known_parts and homes and homes != ["hydra"]:
        fix = f"{homes[0]}.{wrong}={value}"
    else:
        fix = _nearest(known_parts, missing, list(dict.fromkeys(names)), value)
    if override.is_delete() and not fix.startswith("nothing"):
        fix = f"'~{fix.removesuffix('=')}'"
    return ConfigError(typed, f"there is no {override.key_or_group!r}", fix)


def _deepest(config: Any, parts: list[str]) -> tuple[Any, list[str], list[str]]:
    """The deepest section on the way to a key, the parts that lead to it, and those that do not exist."""
    node = config
    for number, part in enumerate(parts):
        if part not in node:
            return node, parts[:number], parts[number:]
        child = node._get_node(part)
        if number + 1 < len(parts) and not OmegaConf.is_dict(child):
            return node, parts[:number], parts[number:]
        node = child
    return node, parts, []


def _nearest(known: list[str], missing: list[str], names: list[str], value: str) -> str:
    """What to type instead of a key: the nearest name, the option that brings it, or the names there are."""
    wrong, *below = missing
    near = get_close_matches(wrong, [name for name in names if name != wrong], 3)
    if near:
        near.sort(key=lambda name: not (CONF / name / f"{value}.yaml").is_file())
        return f"{'.'.join([*known, near[0], *below])}={value}"
    if (CONF.joinpath(*known) / f"{wrong}.yaml").is_file():
        return f"+{'/'.join(known)}={wrong}, which brings it"
    if not known:
        return "python train.py --help for the words there are"
    offered = " ".join(f"{'.'.join([*known, name])}=" for name in names)
    return f"one of {offered}" if offered else f"nothing for {'.'.join([*known, *missing])}"


def _groups() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def _as_mistake(error: BaseException) -> ConfigError:
    """What Hydra or the YAML reader said, the innermost cause included: it names the file."""
    said = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        said.append(str(error))
    lines = [line.strip() for text in said for line in text.splitlines() if line.strip()]
    return ConfigError("a file under conf/", " ".join(dict.fromkeys(lines)), "what it says there")
