"""Command line -> one plain, resolved config and the run folder. About 0.2 s; imports neither torch nor lightning."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.mistake import Mistake

Config = dict[str, Any]
CONF = Path(__file__).parent.parent / "conf"
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A run as it was typed.

    Attributes:
        config: Plain values, every interpolation resolved; without Hydra's own node.
        run_folder: Where the run leaves its files.
        overrides: What was typed, for the record.
        choices: The option of each group, to name it in messages.
    """

    config: Config
    choices: dict[str, str]
    run_folder: Path
    overrides: list[str]


def register_resolvers() -> None:
    """Make `${run_folder:…}` and Hydra's `${now:…}` known. Repeatable."""
    setup_globals()
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)


def run_folder(name: str, resume: str | None) -> str:
    """The run folder where `hydra.run.dir` is not typed.

    A run that resumes another goes on in its folder; under SLURM and torchrun the folder is keyed by the job,
    so that a requeued job finds it; else it is new.
    """
    if resume not in (None, "auto") and (resumed := folder_of_run(str(resume))):
        return str(resumed)
    for variable in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        job = os.environ.get(variable)
        if job not in (None, "", "none"):
            return f"logs/{name}/{variable.split('_')[0].lower()}_{job}"
    return f"logs/{name}/{time.strftime('%Y-%m-%d_%H-%M-%S')}"


def folder_of_run(resume: str) -> Path | None:
    """The run folder that holds `resume`: itself, or two above a checkpoint. None if there is no config in it."""
    named = Path(resume)
    for candidate in (named, named.parent.parent):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    return None


def compose_run(
    overrides: Sequence[str], *, config_folder: Path = CONF, config_name: str = "config"
) -> Composed:
    """Compose a run from what was typed.

    With `resume=<run>` the run's own frozen config is the base, and only what is typed now changes it.

    Raises:
        hydra.errors.HydraException: A group, option or key does not exist.
        Mistake: An interpolation names nothing.
    """
    register_resolvers()
    resumed = _resumed_run(overrides)
    before = _typed_before(resumed, overrides) if resumed else []
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder.resolve()), version_base="1.3"):
        node = compose(config_name, [*before, *overrides], return_hydra_config=True)
    folder = Path(node.hydra.run.dir)
    choices = {group: str(option) for group, option in node.hydra.runtime.choices.items()}
    config = _plain(node)
    if resumed and not any(override.startswith("recipe=") for override in overrides):
        frozen: Config = yaml.safe_load((resumed / CONFIG_FILE).read_text())
        frozen.pop("hydra", None)
        config = _changed(frozen, config, overrides)
    return Composed(
        config=config, choices=choices, run_folder=folder, overrides=[*before, *overrides]
    )


def freeze(composed: Composed) -> None:
    """Write the config into the run folder, so that it can be run again from there, from its beginning."""
    again = {"run": {"dir": "${run_folder:${name},${resume}}"}, "output_subdir": None}
    config = composed.config | {"resume": None, "hydra": again}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    header = "# Run it again: python train.py --config-path <this folder> --config-name config\n"
    (composed.run_folder / CONFIG_FILE).write_text(header + text)


def parse(override: str) -> Override:
    """One `key=value`, parsed by Hydra's grammar."""
    parsed: Override = OverridesParser.create().parse_override(override)
    return parsed


def _plain(node: DictConfig) -> Config:
    config: Config = {}
    for key in node:
        if key == "hydra":
            continue
        try:
            child = node._get_node(key)
            resolved = OmegaConf.is_config(child)
            config[str(key)] = (
                OmegaConf.to_container(node[key], resolve=True) if resolved else node[key]
            )
        except OmegaConfBaseException as error:
            where = error.full_key or str(key)
            raise Mistake(
                f"{where}=…", str(error).splitlines()[0], f"{where}=<value> on the command line"
            ) from error
    return config


def _resumed_run(overrides: Sequence[str]) -> Path | None:
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "resume" and value not in ("null", "auto", ""):
            return folder_of_run(value.strip("'\""))
    return None


def _typed_before(resumed: Path, overrides: Sequence[str]) -> list[str]:
    """What the resumed run was started with, less what is typed anew: the groups' context of what is typed now."""
    record = resumed / ENVIRONMENT_FILE
    if not record.is_file():
        return []
    typed_now = {parse(override).key_or_group for override in overrides} | {"hydra.run.dir", "mode"}
    typed: list[str] = json.loads(record.read_text())["overrides"]
    return [
        override
        for override in typed
        if (key := parse(override).key_or_group) not in typed_now and not key.startswith("mode.")
    ]


def _changed(frozen: Config, composed: Config, overrides: Sequence[str]) -> Config:
    """The frozen config with the nodes that were typed now, and with the mode of now."""
    for override in ["mode=", *overrides]:
        *parents, last = override.partition("=")[0].lstrip("+~").split("@")[0].split(".")
        if parents[:1] == ["hydra"]:
            continue
        target, source = frozen, composed
        for parent in parents:
            target, source = target.setdefault(parent, {}), source[parent]
        if last in source:
            target[last] = source[last]
        else:
            target.pop(last, None)
    return frozen
