"""Check the settings at the top of the config, and the sections that hold nodes: which exist, and of what type."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from recipes.config.check.types import annotation_from, describe, matches_type, placeholder
from recipes.errors import ConfigError

CONF = Path(__file__).parents[3] / "conf"

SETTINGS: dict[str, str] = {
    "name": "str",
    "seed": "Annotated[int, '>= 0, <= 4294967295']",
    "warmup_steps": "Annotated[int, '>= 0']",
    "tags": "list[str]",
    "resume": "str | None",
    "global_batch_size": "Annotated[int, '>= 1']",
    "micro_batch_size": "Annotated[int, '>= 1'] | None",
    "seq_len": "Annotated[int, '>= 1'] | None",
    "log_every": "Annotated[int, '>= 1']",
    "eval_every": "Annotated[int, '>= 1']",
    "save_every": "Annotated[int, '>= 1'] | None",
    "save_every_minutes": "Annotated[float, '> 0'] | None",
    "eval_samples": "Annotated[int, '>= 1'] | None",
    "ema_decay": "Annotated[float, '> 0, < 1'] | None",
    "label_smoothing": "Annotated[float, '>= 0, <= 0.999']",
    "z_loss": "Annotated[float, '>= 0']",
    "compile": "bool",
    "ignore_slurm": "bool",
    "profile": "Annotated[int, '>= 1'] | None",
}
NODES = ("loader",)  # sections of config.yaml that are not a group
COMPOSING = ("recipe", "debug", "hydra")  # groups without a section of their own
NEWER = (
    "lr_scaling",
    "ignore_slurm",
    "launcher",
    "sweep",
    "metrics",
)  # sections that the frozen configs of older runs lack


def list_groups() -> list[str]:
    """Return the config groups that have a section: the folders of conf/ except those that only compose."""
    folders = (path.name for path in CONF.iterdir() if path.is_dir())
    return sorted(name for name in folders if name not in COMPOSING)


def check_sections(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check for unknown and missing sections, and for settings of the wrong type."""
    sections = [*list_groups(), *NODES]
    for key, value in config.items():
        if key in SETTINGS:
            annotation = annotation_from(SETTINGS[key])
            if not matches_type(value, annotation):
                yield ConfigError(
                    f"{key}={value}",
                    f"it takes {describe(annotation)}",
                    f"{key}=<{placeholder(annotation)}>",
                )
        elif key in sections:
            if not isinstance(value, dict):
                yield ConfigError(f"{key}={value}", "it is a section of settings", _suggest_section(key))
        else:
            near = get_close_matches(key, [*SETTINGS, *sections], 1)
            fix = f"{near[0]}=…" if near else f"one of {', '.join([*SETTINGS, *sections])}"
            yield ConfigError(f"{key}=…", "there is no such setting or section", fix)
    for name, node in dict(config.get("callbacks") or {}).items():
        if node is not None and not (isinstance(node, dict) and "_target_" in node):
            yield ConfigError(
                f"callbacks.{name}={node}",
                "a callback is a section with a _target_",
                f"callbacks.{name}=null",
            )
    name = config.get("name")
    if isinstance(name, str) and (not re.fullmatch(r"[\w.][\w.,=+ -]*", name) or set(name) == {"."}):
        yield ConfigError(f"name={name}", "it names a folder under logs/", "name=<letters, digits, . _ ->")
    for key in [*SETTINGS, *sections]:
        if key not in config and key not in NEWER:
            yield ConfigError(f"no {key}", "every run has one", f"{key}=… (see conf/config.yaml)")


def _suggest_section(key: str) -> str:
    options = sorted(path.stem for path in (CONF / key).glob("*.yaml"))
    return f"{key}=<{' | '.join(options)}>" if options else f"{key}.<setting>=<value>"
