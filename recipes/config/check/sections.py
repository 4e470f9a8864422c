"""Check that top-level settings and sections exist and have the right type."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from recipes.config.check.types import annotation_from, describe, matches_type, placeholder, suggest, to_setting
from recipes.config.overrides import TYPOGRAPHIC_QUOTES, for_shell
from recipes.config.trust import CONF as CONF
from recipes.errors import ConfigError

SETTINGS: dict[str, str] = {
    "name": "str",
    "seed": "Annotated[int, '>= 0, <= 4294967295']",
    "freeze": "list[str]",
    "warmup_steps": "Annotated[int, '>= 0']",
    "tags": "list[str]",
    "resume": "str | None",
    "start_from": "str | None",
    "start_from_weights": "Literal['trained', 'ema']",
    "global_batch_size": "Annotated[int, '>= 1']",
    "micro_batch_size": "Annotated[int, '>= 1'] | None",
    "seq_len": "Annotated[int, '>= 1'] | None",
    "tensor_parallel_size": "Annotated[int, '>= 1']",
    "sequence_parallel": "bool",
    "context_parallel_size": "Annotated[int, '>= 1']",
    "pipeline_parallel_size": "Annotated[int, '>= 1']",
    "pipeline_schedule": "Literal['1F1B', 'Interleaved1F1B', 'ZBVZeroBubble']",
    "expert_parallel_size": "Annotated[int, '>= 1']",
    "data_parallel_replicate": "Annotated[int, '>= 1'] | None",
    "data_parallel_shard": "Annotated[int, '>= 1'] | None",
    "log_every": "Annotated[int, '>= 1']",
    "eval_every": "Annotated[int, '>= 1'] | str",
    "save_every": "Annotated[int, '>= 1'] | str | None",
    "save_every_minutes": "Annotated[float, '> 0'] | None",
    "eval_samples": "Annotated[int, '>= 1'] | Literal['auto'] | None",
    "ema_decay": "Annotated[float, '> 0, < 1'] | None",
    "label_smoothing": "Annotated[float, '>= 0, <= 0.999']",
    "z_loss": "Annotated[float, '>= 0']",
    "loss_chunk_tokens": "Annotated[int, '>= 1'] | None",
    "compile": "bool | Literal['auto', 'default', 'max-autotune-no-cudagraphs', 'reduce-overhead']",
    "attention": "Literal['auto', 'flash', 'cudnn', 'memory_efficient', 'math']",
    "ignore_slurm": "bool",
    "profile_steps": "Annotated[int, '>= 1'] | None",
}
NODES = ("loader", "eval_data")  # sections of config.yaml that are not a group
COMPOSING = ("recipe", "debug", "hydra", "pipeline")  # groups without a section
# sections without a target, or with one only sometimes
WITHOUT_TARGET = (
    *("callbacks", "dashboard", "eval_data", "evaluator", "logger", "lr_scaling", "metrics", "quality"),
    *("reward", "rollout", "tokenizer", "transform"),
)
_NEEDED_OF_TRAINER = ("max_steps", "accelerator", "devices", "num_nodes", "accumulate_grad_batches")
_MAX_NAME_BYTES = 200  # file systems have 255; W&B and the sweep add to it


def list_groups() -> list[str]:
    """Return the config groups that have a section: the folders of conf/ except those that only compose."""
    folders = (path.name for path in CONF.iterdir() if path.is_dir())
    return sorted(name for name in folders if name not in COMPOSING)


def find_missing_groups(config: Mapping[str, Any]) -> list[str]:
    """Return the groups that a config lacks if it is only a part of one."""
    missing = [key for key in list_groups() if key not in config]
    return missing if len(missing) > 1 else []


def check_structure(config: Mapping[str, Any], *, recipe: str | None = None) -> Iterator[ConfigError]:
    """Check that every section exists, with a target and the required keys: later checks read them.

    Args:
        config: The config.
        recipe: The chosen recipe, which may change settings of callbacks that are not chosen.
    """
    for key in [*SETTINGS, *list_groups(), *NODES]:
        if key not in config:
            yield ConfigError(f"no {key}", "this setting is required", suggest_value(key))
        elif key in SETTINGS:
            continue
        elif not isinstance(config[key], dict):
            yield ConfigError(f"{key}={to_setting(config[key])}", "it is a section of settings", suggest_value(key))
        elif key not in WITHOUT_TARGET and not isinstance(config[key].get("_target_"), str):
            target = to_setting(config[key].get("_target_"))
            yield ConfigError(f"{key}._target_={target}", "it names the class or function to call", suggest_value(key))
    trainer = config.get("trainer")
    missing = [key for key in _NEEDED_OF_TRAINER if isinstance(trainer, dict) and key not in trainer]
    for key in missing:
        yield ConfigError(f"no trainer.{key}", "this setting is required", f"trainer.{key}=<value>")
    yield from _check_members(config, recipe)


def _check_members(config: Mapping[str, Any], recipe: str | None) -> Iterator[ConfigError]:
    """Check the callbacks and loggers: each is a section with a target; null switches a callback off."""
    for group, kind in (("callbacks", "callback"), ("logger", "logger")):
        members = config.get(group)
        members = members if isinstance(members, dict) else {}
        for name, node in members.items():
            if isinstance(node, dict) and isinstance(node.get("_target_"), str):
                continue
            if name == "_target_":
                reason, fix = f"each {kind} has a section with a name of its own", f"{group}.<name>._target_={node}"
                yield ConfigError(f"{group}._target_={node}", reason, fix)
            elif group == "logger" and name == "csv":
                fix = "logger=none to write only metrics.csv"
                yield ConfigError("logger.csv=null", "every run writes metrics.csv", fix)
            elif node is not None or group == "logger":
                shown = "…" if isinstance(node, dict) else to_setting(node)
                fix = f"{group}.{name}=null" if group == "callbacks" else f"'~{group}.{name}'"
                reason = f"a {kind} is a section with a _target_"
                if isinstance(node, dict) and (CONF / group / f"{name}.yaml").is_file():
                    chosen = [one for one, other in members.items() if isinstance(other, dict) and "_target_" in other]
                    by = "settings of it are changed" if recipe is None else f"recipe={recipe} changes settings of it"
                    reason = f"{by}, and {group}= does not choose it"
                    fix = f"{group}=[{','.join([*chosen, str(name)])}], or {fix}" if group == "callbacks" else fix
                yield ConfigError(f"{group}.{name}={shown}", reason, fix)
    loggers = config.get("logger")
    if isinstance(loggers, dict) and "csv" not in loggers:
        yield ConfigError("no logger.csv", "every run writes metrics.csv", "logger=none to write only metrics.csv")


NO_SUCH_KEY = "there is no such setting or section"


def check_settings(config: Mapping[str, Any], *, models: Sequence[str] = ()) -> Iterator[ConfigError]:
    """Check for unknown sections, and for settings of the wrong type.

    Args:
        config: The config.
        models: Sections of the frozen models that the task asks.
    """
    sections = [*list_groups(), *NODES, *models]
    for key, value in config.items():
        if key in SETTINGS:
            annotation = annotation_from(SETTINGS[key])
            if not matches_type(value, annotation):
                yield ConfigError(
                    f"{key}={to_setting(value)}",
                    f"it takes {describe(annotation)}",
                    suggest(key, value, annotation),
                )
        elif key not in sections:
            near = get_close_matches(key, [*SETTINGS, *sections], 1)
            fix = f"{near[0]}=…" if near else f"the same command without {key}"
            yield ConfigError(f"{key}=…", NO_SUCH_KEY, fix)
    name = config.get("name")
    if isinstance(name, str):
        if not re.fullmatch(r"[\w.][\w.,=+ -]*", name) or name.strip(".") == "":
            meant = re.sub(r"[^\w.,=+ -]+", "_", name.strip(TYPOGRAPHIC_QUOTES)).strip("_. ")
            fix = for_shell(f"name={meant}") if meant else "name=<letters, digits, . _ ->"
            yield ConfigError(f"name={name}", "it names a folder under logs/: letters, digits, . _ and -", fix)
        elif len(os.fsencode(name)) > _MAX_NAME_BYTES:
            shown = f"name={name[:40]}…"
            yield ConfigError(shown, f"it names a folder: {_MAX_NAME_BYTES} bytes at most", "name=<a shorter name>")


def suggest_value(key: str) -> str:
    """Return the override that gives a setting or a section its simplest value."""
    if key in SETTINGS:
        annotation = annotation_from(SETTINGS[key])
        return f"{key}=null" if matches_type(None, annotation) else f"{key}=<{placeholder(annotation)}>"
    options = sorted(path.stem for path in (CONF / key).glob("*.yaml"))
    if "none" in options or "default" in options:
        return f"{key}={'none' if 'none' in options else 'default'}"
    return f"{key}=<{' | '.join(options)}>" if options else f"{key}.<setting>=<value>"


def is_of_file(mistake: ConfigError) -> bool:
    """Return whether an error is of the whole file of an own option, so that those of its settings are consequences."""
    is_option = re.fullmatch(r"[a-z_]+=[^.]*", mistake.setting) is not None
    return is_option and (" at the top of " in mistake.fix or " as the first line of " in mistake.fix)
