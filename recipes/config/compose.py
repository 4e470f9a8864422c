"""Command line -> one plain, resolved config and the run folder. About 0.2 s; imports neither torch nor lightning."""

import dataclasses
import glob
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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

from recipes.config.overrides import to_overrides
from recipes.config.traits import trains
from recipes.errors import ConfigError
from recipes.lr_scaling import scaled_lr
from recipes.numerics.accumulation import steps_of
from recipes.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, find_run_folder

Config = dict[str, Any]
CONF = Path(__file__).parents[2] / "conf"
_NO_WORD = re.compile(r"\d+|nan|inf|null|true|false", re.IGNORECASE)  # to Hydra's grammar
MODE_OF_SWEEPS = "mode=wandb_sweep"  # one composed run, whose words may name several values


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A run as it was typed.

    Attributes:
        config: Plain values, every interpolation resolved; without Hydra's own node.
        run_folder: Where the run leaves its files.
        overrides: What was typed, for the record.
        choices: The option of each group, to name it in messages.
        sweep_overrides: What a sweep would vary: `hydra.sweeper.params`, then what was typed with `mode=wandb_sweep`.
        config_folder: Where it was composed from.
        config_name: The file that composition began with.
    """

    config: Config
    choices: dict[str, str]
    run_folder: Path
    overrides: list[str]
    sweep_overrides: list[str] = field(default_factory=list)
    config_folder: str = str(CONF)
    config_name: str = "config"

    @property
    def trains(self) -> bool:
        """Whether the run trains; every other mode runs once, on one device."""
        return trains(self.config)


def register_resolvers() -> None:
    """Make `${run_folder:…}`, `${scaled_lr:…}`, `${steps_of:…}` and Hydra's `${now:…}` known. Repeatable."""
    setup_globals()
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("scaled_lr", scaled_lr, replace=True)
    OmegaConf.register_new_resolver("steps_of", steps_of, replace=True)


def quote_options(overrides: Sequence[str]) -> list[str]:
    """What was typed, with quotes where Hydra takes the name of an option for a number: `debug=nan`, `precision=16`."""
    return [_quote_option(override) for override in overrides]


def _quote_option(override: str) -> str:
    group, equals, names = override.partition("=")
    if not equals or not group or not (CONF / group).is_dir():
        return override
    words = [f"'{name}'" if _NO_WORD.fullmatch(name) else name for name in names.split(",")]
    return f"{group}={','.join(words)}"


def run_folder(name: str, resume: str | None) -> str:
    """The run folder where `hydra.run.dir` is not typed.

    A run that resumes another goes on in its folder; under SLURM, torchrun and a W&B agent the folder is keyed by
    the job, so that a requeued job finds it; else it is new.
    """
    if resume not in (None, "auto") and (resumed := find_run_folder(Path(str(resume)))):
        return str(resumed)
    if job := cluster_job_name():
        return f"logs/{name}/{job}"
    fresh = f"logs/{name}/{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    taken = len(glob.glob(f"{fresh}*"))  # by a start in the same second
    return f"{fresh}_{taken + 1}" if taken else fresh


def cluster_job_name() -> str | None:
    """A name for what a W&B agent, SLURM or torchrun started, the same when it is started again; else None."""
    sweep, trial = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    if sweep and trial:  # an agent carries out one trial after the other in one job of SLURM
        return f"wandb_{sweep}/{trial}"
    for variable, prefix in (("SLURM_JOB_ID", "slurm"), ("TORCHELASTIC_RUN_ID", "torchelastic")):
        job = os.environ.get(variable)
        if job not in (None, "", "none"):  # torchrun says none where no id was given
            return f"{prefix}_{job}"
    return None


def compose_run(
    overrides: Sequence[str], *, config_folder: Path = CONF, config_name: str = "config"
) -> Composed:
    """Compose a run from what was typed.

    With `resume=<run>` the run's own frozen config is the base, and only what is typed now changes it.

    Raises:
        hydra.errors.HydraException: A group, option or key does not exist.
        ConfigError: An interpolation names nothing.
    """
    register_resolvers()
    overrides = quote_options(overrides)
    resumed = _resumed_run(overrides)
    before = _typed_before(resumed) if resumed else []
    overrides, swept = _without_sweeps(overrides)
    parsed = [parse_override(override) for override in overrides]
    typed_now = {override.key_or_group for override in parsed if not override.is_delete()}
    typed_again = set(overrides)  # a deletion cannot be carried out twice
    kept = [
        override
        for override in before
        if override not in typed_again and parse_override(override).key_or_group not in typed_now
    ]
    node = _compose([*kept, *overrides], config_folder, config_name)
    config = _plain(node)
    if resumed:
        frozen: Config = yaml.safe_load((resumed / CONFIG_FILE).read_text())
        frozen.pop("hydra", None)
        as_typed_before = _plain(_compose(before, config_folder, config_name))
        frozen |= {key: config[key] for key in ("mode", "resume")}
        config = _changed(frozen, before=as_typed_before, now=config)
    return Composed(
        config=config,
        choices={group: str(option) for group, option in node.hydra.runtime.choices.items()},
        run_folder=Path(node.hydra.run.dir),
        overrides=[*kept, *overrides],
        sweep_overrides=[*to_overrides(_params(node)), *swept],
        config_folder=str(config_folder),
        config_name=config_name,
    )


def freeze(composed: Composed) -> None:
    """Write the config into the run folder, so that it can be run again from there, from its beginning."""
    again = {"run": {"dir": "${run_folder:${name},${resume}}"}, "output_subdir": None}
    config = composed.config | {"resume": None, "hydra": again}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    header = "# Run it again: python train.py --config-path <this folder> --config-name config\n"
    (composed.run_folder / CONFIG_FILE).write_text(header + text)


def parse_override(override: str) -> Override:
    """One `key=value`, parsed by Hydra's grammar."""
    parsed: Override = OverridesParser.create().parse_override(override)
    return parsed


def _compose(overrides: Sequence[str], folder: Path, name: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder.resolve()), version_base="1.3"):
        return compose(name, list(overrides), return_hydra_config=True)


def _without_sweeps(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """What was typed, and the sweeps in it where the mode takes them; everywhere else Hydra refuses them."""
    takes = MODE_OF_SWEEPS in overrides
    swept = [
        override for override in overrides if takes and parse_override(override).is_sweep_override()
    ]
    return [override for override in overrides if override not in swept], swept


def _params(node: DictConfig) -> Config:
    """What Hydra's sweeper would vary."""
    params = OmegaConf.select(node, "hydra.sweeper.params")
    plain: Any = {} if params is None else OmegaConf.to_container(params, resolve=True)
    return dict(plain)


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
            raise ConfigError(
                f"{where}=…", str(error).splitlines()[0], f"{where}=<value> on the command line"
            ) from error
    return config


def _resumed_run(overrides: Sequence[str]) -> Path | None:
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "resume" and value not in ("null", "auto", ""):
            return find_run_folder(Path(value.strip("'\"")))
    return None


def _typed_before(resumed: Path) -> list[str]:
    """What the resumed run was started with, less what belongs to one start alone."""
    record = resumed / ENVIRONMENT_FILE
    if not record.is_file():
        return []
    typed: list[str] = json.loads(record.read_text())["overrides"]
    keys = {override: parse_override(override).key_or_group for override in typed}
    of_one_start = ("hydra.", "mode.")
    return [
        override
        for override, key in keys.items()
        if key not in ("mode", "resume") and not key.startswith(of_one_start)
    ]


def _changed(frozen: Config, *, before: Config, now: Config) -> Config:
    """The frozen config with every value that what is typed now changes, directly or by interpolation."""
    if before.get("_target_") != now.get("_target_"):
        return now  # another option: nothing of the old one is left
    changed = dict(frozen)
    for key in now:
        if key in before and before[key] == now[key]:
            continue
        both = all(isinstance(config.get(key), dict) for config in (changed, before, now))
        if both:
            changed[key] = _changed(changed[key], before=before[key], now=now[key])
        else:
            changed[key] = now[key]
    return {key: value for key, value in changed.items() if key in now or key not in before}


def to_json(composed: Composed) -> str:
    """A composed run as text for another process."""
    fields = dataclasses.asdict(composed) | {"run_folder": str(composed.run_folder)}
    return json.dumps(fields)


def from_json(text: str) -> Composed:
    """The composed run that another process wrote."""
    fields = json.loads(text)
    return Composed(**fields | {"run_folder": Path(fields["run_folder"])})
