"""Compose the command line into one plain, resolved config and its run folder; imports neither torch nor Lightning."""

import dataclasses
import glob
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from recipes.config.cached_compose import compose_overrides
from recipes.config.classes import leave_out_top_k, take_num_classes
from recipes.config.epochs import take_epochs, write_epochs
from recipes.config.instantiate import PARTIAL, RULES, TARGET
from recipes.config.local_path import find_address
from recipes.config.overrides import REFERENCE, escape_interpolations, for_shell, parse_override, to_overrides
from recipes.config.own_code import fill_defaults
from recipes.config.published import llava_size, published_size
from recipes.config.resume import (
    apply_changes,
    complete,
    compose_recorded,
    read_resumed_run,
    select_inherited,
    take_typed,
)
from recipes.config.search_path import expand_home, select_search_path
from recipes.config.signature import TargetNotFoundError, read_signature
from recipes.config.start_from import take_tokenizer
from recipes.config.trust import CONF as CONF
from recipes.config.trust import SEARCH_PATH, find_resumed_run, find_trusted_folders, restrict_variables
from recipes.errors import ConfigError, type_command
from recipes.files import write_atomically
from recipes.lr_scaling import scaled_lr
from recipes.numerics.accumulation import steps_of
from recipes.run_folder import CONFIG_FILE, FROZEN, create_new, find_run_folder, has_checkpoint, read_config

Config = dict[str, Any]
# names of options that Hydra's grammar reads as a number, a boolean or null
_NOT_TEXT = re.compile(r"\d+|nan|inf|null|true|false", re.IGNORECASE)
_CLOCK = "%Y-%m-%d_%H-%M-%S"
_CLOCK_NAME = r"\d{4}(-\d\d){2}_\d\d(-\d\d){2}(_\d+)?"
# what OmegaConf says -> the same without its terms
_IN_WORDS = (
    (re.compile(r"Interpolation key '(.*?)' not found"), r"there is no setting '\1'"),
    (re.compile(r"Unsupported interpolation type (\S+)"), r"there is no function '\1' to compute one"),
    (re.compile(r"Invalid type assigned: \w+ is not a subclass of"), "it is a section of settings"),
)
MODE_OF_SWEEPS = "mode=wandb_sweep"  # composes a single run, yet its overrides may hold sweeps


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A composed run.

    Attributes:
        config: Plain values, every interpolation resolved; without Hydra's own node.
        run_folder: Folder for the files of the run.
        overrides: Command-line overrides, for the record; those of the resumed run come first.
        typed: Overrides of this command line alone.
        dropped_overrides: Overrides of the resumed run that no longer apply, because another option was chosen.
        added_settings: Settings that the config of the resumed run does not have, because a later version added them.
        edits: Lines about what the files of one's own classes have in the place of what the resumed run was made with.
        left_out: Metrics that are left out, each with why.
        choices: Option chosen for each group, to name it in messages.
        references: Key of each setting that only refers to another one, and that one: `data.seq_len` to `seq_len`.
        sweep_overrides: Overrides that a sweep varies: `hydra.sweeper.params`, then those typed with
            `mode=wandb_sweep`.
        config_folder: Config folder.
        config_name: Primary config, without its suffix.
        continues: Whether the run folder holds an earlier start of this same run.
        epochs: Length of the run in passes over its data, as typed, until these are counted; None: it is in steps.
    """

    config: Config
    choices: dict[str, str]
    run_folder: Path
    overrides: list[str]
    typed: list[str] = field(default_factory=list)
    dropped_overrides: list[str] = field(default_factory=list)
    added_settings: list[str] = field(default_factory=list)
    edits: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    references: dict[str, str] = field(default_factory=dict)
    sweep_overrides: list[str] = field(default_factory=list)
    config_folder: str = str(CONF)
    config_name: str = "config"
    continues: bool = False
    epochs: str | None = None


_Run = TypeVar("_Run", bound=Composed)


def register_resolvers(read_variable: Callable[..., str | None] = oc.env) -> None:
    """Register the resolvers of conf/, such as `${run_folder:…}`, and Hydra's; may be called repeatedly.

    Args:
        read_variable: Resolves `${oc.env:…}`.
    """
    setup_globals()
    OmegaConf.register_new_resolver("oc.env", read_variable, replace=True)
    OmegaConf.register_new_resolver("first_of", first_of, replace=True)
    OmegaConf.register_new_resolver("half", half, replace=True)
    OmegaConf.register_new_resolver("llava_size", llava_size, replace=True)
    OmegaConf.register_new_resolver("published_size", published_size, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("scaled_lr", scaled_lr, replace=True)
    OmegaConf.register_new_resolver("steps_of", steps_of, replace=True)


def first_of(*values: Any) -> Any:
    """Return the first value that is not null, or null; `${first_of:…}` in conf/."""
    return next((value for value in values if value is not None), None)


def in_words(message: str) -> str:
    """Return what OmegaConf says without its own terms, where those are known."""
    found = next(((found, words) for pattern, words in _IN_WORDS if (found := pattern.search(message))), None)
    return found[0].expand(found[1]) if found else message


def quote_options(overrides: Sequence[str]) -> list[str]:
    """Quote option names that Hydra's grammar would not read as text: `debug=nan`, `precision=16`.

    Text with surrounding spaces is also quoted: `mode.prompt='    return x'`. `trainer.max_epochs=3` becomes
    `trainer.max_steps=3epochs`, so that each of the two replaces the other.
    """
    return [_quote_option(override) for override in overrides]


def _quote_option(override: str) -> str:
    override = write_epochs(override)
    group, equals, names = override.partition("=")
    if "~" in names and SEARCH_PATH in group:
        return expand_home(override)
    if names != names.strip() and _is_plain_text(
        f"{group}={names.strip()}"
    ):  # Hydra's grammar strips spaces around a value
        return f"{group}={QuotedString(text=names, quote=Quote.single).with_quotes()}"
    if not equals or not group or not (CONF / group).is_dir():
        return override
    is_list = names.startswith("[") and names.endswith("]")
    inner = names[1:-1] if is_list else names
    quoted = ",".join(f"'{name}'" if _NOT_TEXT.fullmatch(name.strip()) else name for name in inner.split(","))
    return f"{group}=[{quoted}]" if is_list else f"{group}={quoted}"


def _is_plain_text(override: str) -> bool:
    """Return whether an override sets unquoted text."""
    try:
        parsed = parse_override(override)
    except HydraException:
        return False
    is_quoted = override.endswith(("'", '"'))
    return not parsed.is_sweep_override() and not is_quoted and isinstance(parsed.value(), str)


def half(number: object) -> int | None:
    """Return half of a whole number, rounded down; None of anything else, which the check of its setting reports."""
    return number // 2 if isinstance(number, int) else None


def run_folder(name: str, resume: str | None) -> str:
    """Return the default of `hydra.run.dir`.

    A resumed run stays in its folder. Under SLURM, torchrun and a W&B agent the folder is keyed by the job, so that a
    requeued job finds it. Otherwise the folder is new.

    Args:
        name: Name of the run, a folder under logs/.
        resume: null, `auto`, a run folder or a checkpoint.
    """
    if resume not in (None, "auto") and (resumed := find_run_folder(Path(os.path.expanduser(str(resume))))):
        return str(resumed)
    if job := cluster_job_name():
        return f"logs/{name}/{job}"
    fresh = f"logs/{name}/{time.strftime(_CLOCK)}"
    num_taken = len(glob.glob(f"{fresh}*"))  # runs started in the same second
    return f"{fresh}_{num_taken + 1}" if num_taken else fresh


def claim_folder(composed: _Run) -> _Run:
    """Create the folder of a new run, under an unused name if it is named by timestamp.

    Runs started in the same second compose the same name: the first one gets it, later ones append a number.
    """
    folder = composed.run_folder
    is_named_by_clock = re.fullmatch(_CLOCK_NAME, folder.name) and composed.config["resume"] is None
    if not is_named_by_clock or any(override.startswith("hydra.run.dir=") for override in composed.overrides):
        return composed
    stem = folder.name[: len("2000-01-01_00-00-00")]
    return dataclasses.replace(composed, run_folder=create_new(folder, stem=stem))


def cluster_job_name() -> str | None:
    """Return a name that a W&B agent, SLURM or torchrun job keeps across restarts; None for other runs."""
    sweep, trial = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    if sweep and trial:  # an agent runs many trials within a single SLURM job
        return f"wandb_{sweep}/{trial}"
    for variable, prefix in (("SLURM_JOB_ID", "slurm"), ("TORCHELASTIC_RUN_ID", "torchelastic")):
        job = os.environ.get(variable)
        if job not in (None, "", "none"):  # torchrun sets "none" without --rdzv-id
            return f"{prefix}_{job}"
    return None


def compose_run(overrides: Sequence[str], *, config_folder: Path = CONF, config_name: str = "config") -> Composed:
    """Compose a run from command-line overrides.

    With `resume=<run>` that run's frozen config is the base; only newly typed overrides change it.

    Raises:
        hydra.errors.HydraException: A group, option or key does not exist.
        omegaconf.errors.OmegaConfBaseException: A value is of the wrong type.
        ConfigError: An interpolation refers to a missing key, or a file of the resumed run is damaged.
    """
    overrides = quote_options(overrides)
    is_own = find_resumed_run(overrides) is None and config_folder.resolve() in find_trusted_folders(overrides)
    register_resolvers(*([] if is_own else [restrict_variables(overrides)]))
    resumed = read_resumed_run(overrides, config_folder, config_name)
    overrides, sweeps = _split_off_sweeps(overrides)
    recorded = None if resumed is None else compose_recorded(resumed, config_folder, config_name)
    added: list[str] = []
    inherited, dropped = select_inherited(resumed, overrides, config_folder, config_name) if resumed else ([], [])
    node = compose_overrides([*inherited, *overrides], config_folder, config_name)
    node = _fit_to_classes(node, [*inherited, *overrides])
    epochs = take_epochs(node)
    config = _to_plain(node)
    if isinstance(config.get("resume"), str):
        config["resume"] = os.path.expanduser(config["resume"])
    if isinstance(config.get("start_from"), str):
        config["start_from"] = os.path.expanduser(config["start_from"])
    composed, folder = config, _get_run_folder(node)
    if resumed is None:
        config = take_tokenizer(config, folder, overrides)
    if resumed and recorded is not None:
        before = _to_plain(_fit_to_classes(recorded, resumed.overrides))
        completed, added = complete(resumed.config, before)
        frozen = completed | {key: config[key] for key in ("mode", "resume", "evaluator") if key in config}
        changed = apply_changes(frozen, before=before, now=config)
        config = _use_cache_of(config, take_typed(changed, config, overrides, _find_references(node)))
    config, edits = fill_defaults(
        config, composed, lambda: resumed.config if resumed else _read_earlier(config, folder)
    )
    left_out = leave_out_top_k(config, [*inherited, *overrides])
    return Composed(
        config=config,
        choices={group: str(option) for group, option in node.hydra.runtime.choices.items()},
        run_folder=folder,
        overrides=[*inherited, *overrides],
        typed=[*overrides],
        dropped_overrides=dropped,
        added_settings=added,
        edits=edits,
        left_out=left_out,
        references=_find_references(node),
        sweep_overrides=[*to_overrides(_get_sweeper_params(node)), *sweeps],
        config_folder=str(config_folder),
        config_name=config_name,
        epochs=epochs,
    )


def _read_earlier(config: Config, folder: Path) -> Config | None:
    """Return the frozen config of the run that `resume=auto` continues; None if there is none."""
    goes_on = config.get("resume") == "auto" and has_checkpoint(folder) and (folder / CONFIG_FILE).is_file()
    return read_config(folder) if goes_on else None


def _fit_to_classes(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Fit the settings of a composed config to the classes that are typed, and return it."""
    _leave_out_untaken(config, overrides)
    _name_after_module(config, overrides)
    take_num_classes(config)
    return config


def _name_after_module(config: DictConfig, overrides: Sequence[str]) -> None:
    """Name a run of a LightningModule of one's own after its class, where neither a recipe nor a name is typed."""
    target = OmegaConf.select(config, "task.module._target_", throw_on_missing=False)
    if isinstance(target, str) and not any(
        override.lstrip("+").startswith(("recipe=", "name=")) for override in overrides
    ):
        config.name = target.rpartition(".")[2]


def _leave_out_untaken(config: DictConfig, overrides: Sequence[str]) -> None:
    """Leave out the settings of an option that belong to its class, where another class is typed in its place.

    `loss._target_=focal.Focal` replaces the class of `loss=cross_entropy`, and with it the settings that Focal does not
    take; those of the same name stay, and so does everything that is typed.

    Args:
        config: Composed config.
        overrides: Overrides that it was composed of.
    """
    typed: list[str] = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        nested = parse_override(override).value() if value[:1] == "{" and TARGET in value else {}
        typed += [key, *(f"{key}.{name}" for name in (nested if isinstance(nested, dict) else {}))]
    untaken: list[tuple[str, str]] = []
    for section in {key.removesuffix(f".{TARGET}"): key for key in typed if key.endswith(f".{TARGET}")}:
        node = OmegaConf.select(config, section)
        try:
            signature = read_signature(str(node[TARGET])) if OmegaConf.is_dict(node) and TARGET in node else None
        except TargetNotFoundError:  # reported by the check of nodes
            continue
        if signature is not None and not signature.takes_any:
            kept = (TARGET, PARTIAL, *signature.parameters, *(RULES if section == "optimizer" else ()))
            # `task.module.optimizer.lr` types the section `optimizer`, too
            is_typed = {str(name): any(f"{key}.".startswith(f"{section}.{name}.") for key in typed) for name in node}
            untaken += [(section, name) for name in is_typed if name not in kept and not is_typed[name]]
    with open_dict(config):
        for section, name in untaken:
            del OmegaConf.select(config, section)[name]


def _use_cache_of(now: Config, resumed: Config) -> Config:
    """Set a resumed config's cache folder to the current one, which belongs to the machine, not to the run."""
    data, cache_dir = resumed.get("data"), (now.get("data") or {}).get("cache_dir")
    if not isinstance(data, dict) or "cache_dir" not in data or cache_dir is None:
        return resumed
    return resumed | {"data": data | {"cache_dir": cache_dir}}


def freeze(composed: Composed) -> None:
    """Write the config into the run folder, in a form that can start the same run from scratch."""
    again = {"run": {"dir": "${run_folder:${name},${resume}}"}, "output_subdir": None}
    config = escape_interpolations(composed.config | {"resume": None}) | {"hydra": again}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    again_with = [*map(for_shell, select_search_path(composed.overrides)), "--config-path <this folder>"]
    header = f"{FROZEN}{type_command(' '.join(again_with))} --config-name config\n"
    write_atomically(composed.run_folder / CONFIG_FILE, header + text, fsync=True)


def _find_references(node: DictConfig) -> dict[str, str]:
    """Return the key of every value that is nothing but `${other}`, and the other key, which may not exist."""
    keys = _list_keys(OmegaConf.to_container(node))
    found = {key: match[1] or match[2] for key, value in keys if (match := REFERENCE.fullmatch(str(value)))}
    # `${.name}` refers to a key of the same section
    return {key: f"{key.rpartition('.')[0]}{other}" if other.startswith(".") else other for key, other in found.items()}


def _list_keys(section: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and value of every section and setting."""
    for name, value in section.items() if isinstance(section, dict) else ():
        key = f"{path}{name}"
        yield key, "" if isinstance(value, dict) else value
        yield from _list_keys(value, f"{key}.")


def _split_off_sweeps(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into plain ones and sweeps where the mode accepts sweeps; elsewhere Hydra rejects them."""
    accepts = MODE_OF_SWEEPS in overrides
    sweeps = [override for override in overrides if accepts and parse_override(override).is_sweep_override()]
    return [override for override in overrides if override not in sweeps], sweeps


def _get_sweeper_params(node: DictConfig) -> Config:
    params = OmegaConf.select(node, "hydra.sweeper.params")
    plain: Any = {} if params is None else OmegaConf.to_container(params, resolve=True)
    return dict(plain)


def _get_run_folder(node: DictConfig) -> Path:
    try:
        if node.hydra.run.dir == "":
            raise ConfigError("hydra.run.dir=", "a run needs a folder", "hydra.run.dir=<folder>")
        if address := find_address("hydra.run.dir", node.hydra.run.dir):
            raise address
        return Path(os.path.expanduser(node.hydra.run.dir))  # a shell does not expand the ~ in key=~/x
    except OmegaConfBaseException as error:
        reason = in_words(str(error).splitlines()[0])
        raise ConfigError("hydra.run.dir=…", reason, "hydra.run.dir=<folder>") from error


def _to_plain(node: DictConfig) -> Config:
    config: Config = {}
    for key in node:
        if key == "hydra":
            continue
        try:
            value = node[key]  # resolved, and a section or list even where a resolver returned it
            config[str(key)] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            full_key = error.full_key or str(key)
            raise ConfigError(
                f"{full_key}=…",
                in_words(str(error).splitlines()[0]),
                f"{full_key}=<value> on the command line",
            ) from error
    config.setdefault("callbacks", {})  # missing after `callbacks=[]` and `~callbacks`
    return config
