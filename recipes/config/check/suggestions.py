"""Suggest a replacement for an unknown setting or option: the nearest name, or the option that has it."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from recipes.config.check.text_values import find_annotation
from recipes.config.check.types import matches_type
from recipes.config.epochs import MAX_STEPS
from recipes.config.overrides import REFERENCE, for_shell
from recipes.config.search_path import find_config_folders
from recipes.config.signature import find_signature
from recipes.config.traits import read_sample_kind, read_target_kind, read_target_kinds
from recipes.errors import type_command

# common names of a precision or a strategy -> option
_OF_RECIPES = ("pairs", "answers", "completions")  # kinds of targets
_OPTION_ALIASES = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16_mixed", "bf16-amp"), "bf16-mixed"),
    **dict.fromkeys(("fp16", "float16", "half", "16", "amp", "mixed", "fp16-mixed", "16_mixed"), "16-mixed"),
    **dict.fromkeys(("fp32", "float32", "float", "single", "full", "32", "fp32-true", "32_true"), "32-true"),
    **dict.fromkeys(("fp8", "float8"), "fp8-mixed"),
}
_STRATEGY_ALIASES = {
    "single_device": "single",
    "dp": "ddp",
    "fsdp2": "fsdp",
    "deepspeed": "deepspeed_stage_2",
    "zero1": "deepspeed_stage_1",
    "zero2": "deepspeed_stage_2",
    "zero3": "deepspeed_stage_3",
}
# a strategy's name typed as a recipe -> the recipe for a modern GPU
_RECIPE_ALIASES = {name: f"{name}_bf16" for name in ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")}
# methods that are settings of another recipe
_RECIPE_ALIASES |= {
    **dict.fromkeys(("rl", "rlvr", "dapo"), "grpo"),
    "rlhf": "ppo",
    "rloo": "grpo loss.baseline=leave_one_out loss.scale_rewards=none",
    "reinforce": "grpo loss.baseline=batch loss.scale_rewards=batch rollout.num_generations=1",
    "dr_grpo": "grpo loss.kind=dr_grpo loss.scale_rewards=none",
    "gspo": "grpo loss.kind=gspo loss.epsilon=3e-4 loss.epsilon_high=4e-4",
}
# common names of other options -> option, by group
_ALIASES = {
    "debug": {"fdr": "fast_dev_run", "dev": "fast_dev_run", "profile": "profiler"},
    "recipe": _RECIPE_ALIASES,
    "data": dict.fromkeys(("instructions", "chat"), "conversations"),
    "reward": {**dict.fromkeys(("accuracy", "correct", "correctness"), "exact_match"), "math": "numeric"},
    "strategy": _STRATEGY_ALIASES,
    "mode": {
        "train": "fit",
        "validate": "evaluate",
        "eval": "evaluate",
        "val": "evaluate",
        "benchmark": "evaluate",
        "generate": "sample",
        "infer": "sample",
        "inference": "sample",
        "chat": "sample mode.apply_chat_template=true",
        "tune": "lr_find",
        "search": "fit -m sweep=lr",
        "sweep": "fit -m sweep=lr",
        "finetune": "fit",
        "pretrain": "fit",
        "resume": "fit resume=<run folder>",
        "compare": "report",
        "plot": "report",
        "visualize": "report",
        "analyze": "diagnose",
        "profile": "fit callbacks=[default,step_profiler]",
        "merge": "export",
        "convert": "export",
        "save": "export",
        "tokenize": "prepare",
        "preprocess": "prepare",
        "estimate": "plan",
        "memory": "plan",
        "dry_run": "preflight",
        "check": "preflight",
        "debug": "preflight",
    },
}
# common names of settings elsewhere -> setting
_SETTING_ALIASES = {
    "batch_size": "global_batch_size",
    "block_size": "model.max_seq_len",
    "learning_rate": "optimizer.lr",
    "gpus": "trainer.devices",
    "lr": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "task_name": "name",
    "optimized_metric": "sweep.objective",
    "steps": "trainer.max_steps",
    "num_steps": "trainer.max_steps",
    "max_iters": "trainer.max_steps",
    "devices": "trainer.devices",
    "num_gpus": "trainer.devices",
    "grad_clip": "trainer.gradient_clip_val",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "context_length": "model.max_seq_len",
    "num_workers": "loader.num_workers",
    "checkpoint_every": "save_every",
    "ckpt_path": "resume",
    "resume_from_checkpoint": "resume",
    "output_dir": "hydra.run.dir",
    "out_dir": "hydra.run.dir",
    "run_name": "name",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "sequence_length": "seq_len",
    "per_device_train_batch_size": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "max_grad_norm": "trainer.gradient_clip_val",
    "logging_steps": "log_every",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "dataloader_num_workers": "loader.num_workers",
    "torch_compile": "compile",
    "seed_everything": "seed",
    **dict.fromkeys(("max_completion_length", "response_length"), "rollout.max_new_tokens"),
    **dict.fromkeys(("num_ppo_epochs", "ppo_epochs"), "rollout.num_iterations"),
    **dict.fromkeys(("beta", "kl_coef", "init_kl_coef"), "loss.kl_weight"),
    "kl_weight": "loss.beta",
    "cliprange": "loss.epsilon",
    "loss_type": "loss.kind",
}
# common names of switches -> the option that they turn on
_SWITCHES = {
    "train": "mode=fit",
    "test": "mode=test resume=<run folder>",
    "predict": "mode=predict resume=<run folder>",
    "validate": "mode=evaluate resume=<run folder>",
    "fp16": "precision=16-mixed",
    "bf16": "precision=bf16-mixed",
    "gradient_checkpointing": "activation_checkpoint=full",
    **dict.fromkeys(("dry_run", "dryrun"), "debug=fast_dev_run, or --cfg job, which prints the config"),
}
# options of a trainer in other projects -> what to type
_TRAINERS = {
    "ddp_spawn": "recipe=ddp_bf16",
    "deepspeed": "recipe=zero2_bf16",
    "mps": "trainer.accelerator=cpu",
    "cpu": "trainer.accelerator=cpu",
    "gpu": "recipe=single_bf16",
    "ddp": "recipe=ddp_bf16",
    "ddp_sim": "recipe=ddp_fp32 trainer.accelerator=cpu trainer.devices=2",
    "fsdp": "recipe=fsdp_bf16",
}
# groups of other projects -> group
_GROUP_ALIASES = {"experiment": "recipe", "hparams_search": "sweep", "datamodule": "data"}
# of Hydra's own settings, those that are read here
_OF_HYDRA = ("run.dir", "sweep.dir", "searchpath", "mode")
# common names of a number of passes over the data
_CLASS = re.compile(r"[a-z_]\w*(\.\w+)*\.[A-Z]\w*")  # a dotted path
# what takes a class of Lightning that was typed as an option of a group
_OF_LIGHTNING = {
    "model": ("task=lightning", "task.module={{_target_: {}}}"),
    "task": ("task=lightning", "task.module={{_target_: {}}}"),
    "data": ("data=lightning", "data.module={{_target_: {}}}"),
}
_OF_MODULE = ("optimizer.", "model.", "scheduler.")  # sections in whose place a LightningModule has arguments
_EPOCHS = ("epochs", "max_epochs", "num_epochs", "num_train_epochs", "n_epochs")
OWN_REWARD = "reward=mine reward.mine.path=<file.py>:<function>"
# settings that no other single setting replaces -> what to type
_REPLACED = {
    **dict.fromkeys(("reward.path", "reward_funcs", "reward_fn", "reward_function"), OWN_REWARD),
    "callbacks.model_checkpoint.monitor": "checkpoint.monitor=<metric> checkpoint.mode=<min or max>",
    "extras.print_config": "--cfg job, which prints the config",
    "paths.data_dir": "data.path=<folder of the data>",
    "paths.output_dir": "hydra.run.dir=<run folder>",
    "paths.log_dir": "hydra.run.dir=<run folder>",
    "strategy.offload": "strategy=fsdp strategy.cpu_offload=true, or strategy=deepspeed_stage_2_offload",
}
_MAX_OPTIONS = 2  # named in a suggestion
_SEVERAL = ("callbacks", "logger", "reward")  # groups of which a list of options may be chosen


def list_options(group: str, typed: Sequence[str] = ()) -> list[str]:
    """Return the options of a config group in conf/ and in the folders of a typed search path.

    Args:
        group: Config group.
        typed: Overrides of this command line.
    """
    return sorted({path.stem for folder in find_config_folders(typed) for path in (folder / group).glob("*.yaml")})


# where an option may be that was typed in another group
_GROUPS_OF_OPTIONS = ("model", "data", "task", "recipe", "strategy", "optimizer", "precision", "mode")


def suggest_option(group: str, wrong: str, typed: Sequence[str] = ()) -> str:
    """Return the override with the intended option: ignoring case, an alias, or the closest name."""
    options = list_options(group, typed)
    aliases = _ALIASES.get(group, _OPTION_ALIASES)
    same = [option for option in options if option.lower() == wrong.lower()]
    alias = aliases.get(wrong.lower())
    known = [alias] if alias is not None and alias.partition(" ")[0] in options else []
    near = same or known or get_close_matches(wrong.lower(), options, 1, cutoff=0.55)
    if group in _SEVERAL and group == "callbacks" and wrong.lower() in ("none", "null", "false"):
        return f"{group}=[]"
    if group == "recipe" and wrong.lower() in ("none", "null", "false", ""):
        return f"'~{group}'"
    if group == "logger" and wrong.lower() == "many_loggers":
        return "logger=[csv,tensorboard,wandb]"
    if group == "trainer" and wrong.lower() in _TRAINERS:
        return _TRAINERS[wrong.lower()]
    if group == "reward" and ".py" in wrong:
        return f"reward=mine {for_shell(f'reward.mine.path={wrong}')}{'' if ':' in wrong else ':<function>'}"
    if not near and group in ("model", "task", "data") and _CLASS.fullmatch(wrong):
        choice, section = _OF_LIGHTNING[group]
        return f"{group}._target_={wrong}, or of Lightning {choice} {for_shell(section.format(wrong))}"
    of_another = [other for other in _GROUPS_OF_OPTIONS if not near and wrong.lower() in list_options(other, typed)]
    if of_another:
        return f"{of_another[0]}={wrong.lower()}"
    if not near and group == "recipe":
        return f"'hydra.searchpath=[file://<the folder with recipe/{wrong}.yaml>]' recipe={wrong}"
    if not near:
        near = options if len(options) == 1 else [name for name in options if name == "none" and wrong == "null"]
    return f"{group}={near[0]}" if near else f"{group}=<option>"


def suggest_mode(word: str) -> str | None:
    """Return the override for a command of Lightning's, `fit` or `validate`, typed as a word; None: it is none."""
    options = list_options("mode")
    return suggest_option("mode", word) if word in options or word in _ALIASES["mode"] else None


def suggest_addition(group: str, option: str, chosen: str, typed: Sequence[str] = ()) -> str:
    """Return the override that adds one option of a group to the chosen ones.

    Args:
        group: Config group; most take one option, callbacks and loggers several.
        option: Option to add.
        chosen: Current choice, `default` or `[csv,wandb]`.
        typed: Overrides of this command line.
    """
    if group not in _SEVERAL:
        return f"{group}={option}"
    present = _split_options(chosen)
    if includes(group, option, chosen, typed):
        return f"the same command without it: {group}={','.join(present)} includes it"
    others = [name for name in present if name not in _included(group, option, typed) and name != "none"]
    return f"{group}=[{','.join([*others, option])}]" if others else f"{group}={option}"


def includes(group: str, option: str, chosen: str, typed: Sequence[str] = ()) -> bool:
    """Return whether the choice for a group, `default` or `[csv,wandb]`, includes an option."""
    present = _split_options(chosen)
    return option in present or any(option in _included(group, name, typed) for name in present)


def list_chosen(group: str, choices: Mapping[str, str], typed: Sequence[str]) -> list[str]:
    """Return the chosen options of a group, wherever their sections are, and those that their files include.

    Args:
        group: Config group.
        choices: Option of each group, as Hydra records them; it records none of a list of options.
        typed: Overrides that the run was started with.
    """
    waiting = {*_split_options(find_typed_choice(group, typed) or "")}
    waiting |= {option for place, option in choices.items() if place.partition("@")[0] == group}
    found: set[str] = set()
    while waiting:
        found |= waiting
        waiting = {name for option in waiting for name in _included(group, option, typed)} - found
    return sorted(found)


def find_typed_choice(group: str, typed: Sequence[str]) -> str | None:
    """Return the choice for a group as typed, `default` or `[csv,wandb]`; None if it is not."""
    found = [text.partition("=")[2] for text in typed if text.startswith(f"{group}=")]
    return found[-1].replace("'", "") if found else None


def is_list_of_options(group: str) -> bool:
    """Return whether several options of a group can be chosen at a time: each has one section, with its own name."""
    return any(set(read_option(group, option, ())) - {"defaults"} == {option} for option in list_options(group))


def suggest_setting(
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
    search_path = config.hydra.overrides.hydra  # Hydra's own record of the typed ones
    if override.is_delete():
        near = get_close_matches(wrong, [name for name in names if name != wrong], 1)
        return f"'~{'.'.join([*section, near[0]])}'" if near and len(missing) == 1 else "the same command without it"
    owners = [key for key in _find_sections_with(wrong, config) if key.partition(".")[0] != "hydra"]
    alias = _SETTING_ALIASES.get(wrong)
    if override.key_or_group in _REPLACED:
        return _REPLACED[override.key_or_group]
    if "/" in wrong:  # a group that does not exist
        return suggest_nested(wrong, value, config, search_path)
    if wrong in _SWITCHES and not section:
        return _SWITCHES[wrong] if value.lower() in ("true", "1", "yes", "on") else "the same command without it"
    if wrong in _EPOCHS and section in ([], ["trainer"]):
        return _suggest_epochs(value)
    if alias is not None and not section and _has_own_training(config):
        names_of_it = dict.fromkeys((wrong, alias.rpartition(".")[2]))
        places = [f"{place}.{name}" for name in names_of_it for place in _find_takers(name, config)]
        places += [f"task.module.{wrong}"] if alias.startswith(_OF_MODULE) else []
        places += [f"data.module.{wrong}"] if alias.endswith("batch_size") else []
        if places:
            return f"{places[0]}={value}"
    is_there = alias is not None and _has_setting(alias, config)
    if is_there and (not section or str(alias).rpartition(".")[0] in ("", ".".join(section))):
        return f"{alias}={value}"
    if not section and wrong == "module" and _CLASS.fullmatch(value):
        return suggest_option("model", value)
    if not section and wrong in _GROUP_ALIASES:
        return suggest_option(_GROUP_ALIASES[wrong], value, search_path)
    if section == ["hydra"] and len(missing) == 1 and (near := get_close_matches(wrong, _OF_HYDRA, 1)):
        return for_shell(f"hydra.{near[0]}={value}")
    if section == ["data"] and len(missing) == 1 and (fix := suggest_source(wrong, value, config, search_path)):
        return fix
    if wrong == "val_fraction" and "val_path" in names:  # of whole files
        return f"{'.'.join(section)}.val_path=<a path that exists> of other tokens"
    if not section and owners:
        return f"{owners[0]}.{wrong}={value}"
    is_off = (
        value in ("null", "false", "False", "None") and section in (["callbacks"], ["metrics"]) and len(missing) == 1
    )
    if is_off and not get_close_matches(wrong, names, 1, cutoff=0.75):
        return "the same command without it"
    if options := _find_options(override, config, section, missing, search_path):
        choices = _choose(section[0], options, config, search_path)
        return ", or ".join(f"{choice} {for_shell(typed.lstrip('+'))}" for choice in choices)
    fitting = [name for name in names if len(missing) > 1 or _takes(config, ".".join([*section, name]), override)]
    return find_nearest(section, missing, names, value, search_path, fitting=fitting)


def _has_own_training(config: Any) -> bool:
    """Return whether the training is that of a LightningModule of one's own, with settings of its own."""
    target = OmegaConf.select(config, "task._target_")
    return find_signature(target).constants.get("has_own_training") is True


def _find_takers(name: str, config: Any) -> list[str]:
    """Return the sections of modules of one's own, and those in them, that take a setting; first those that have it."""
    places = [key for key in _list_sections(config) if f"{key}.".startswith(("task.module.", "data.module."))]
    nodes = {key: OmegaConf.select(config, key) for key in places}
    takers = [
        key
        for key, node in nodes.items()
        if name in node or ("_target_" in node and name in find_signature(str(node["_target_"])).parameters)
    ]
    return sorted(takers, key=lambda key: name not in nodes[key])


def suggest_nested(group: str, option: str, config: Any, typed: Sequence[str]) -> str:
    """Return the override for `callbacks/hang=hang`: a group has no groups within it."""
    outer, _, inner = group.partition("/")
    if group == "hydra/launcher":
        return "launcher=slurm" if "submitit" in option else "launcher.max_jobs=<jobs at a time>"
    options = list_options(outer, typed)
    meant = next((name for name in (option, inner) if name in options), None)
    setting = group.replace("/", ".")
    if meant is None and OmegaConf.is_dict(config.get(outer)) and inner in config[outer]:
        return for_shell(f"{setting}={option}")
    return (
        suggest_addition(outer, meant, get_choice(outer, config), typed)
        if meant
        else f"the same command without {group}"
    )


def suggest_name(name: str, value: str) -> str:
    """Return the override for a setting by its common name, such as `lr`, with its value."""
    if name in _EPOCHS:
        return _suggest_epochs(value)
    if name in _SWITCHES and value.lower() not in ("false", "0", "no", "off"):
        return _SWITCHES[name]
    return f"{_SETTING_ALIASES.get(name, name)}={value}"


def _suggest_epochs(value: str) -> str:
    """Return the override for a number of passes over the data."""
    is_number = value.replace(".", "", 1).isdecimal()
    return f"{MAX_STEPS}={value}{'epoch' if value == '1' else 'epochs'}" if is_number else f"{MAX_STEPS}=3epochs"


def _takes(config: Any, key: str, override: Override) -> bool:
    """Return whether a setting takes the value of an override, or its type is not known; a sweep has several."""
    annotation = None if override.is_sweep_override() else find_annotation(config, key)
    if annotation is None:
        return True
    text = str(override.input_line).partition("=")[2]
    return matches_type(override.value(), annotation) or matches_type(text, annotation)


def find_nearest(
    section: list[str],
    missing: list[str],
    names: list[str],
    value: str,
    typed: Sequence[str] = (),
    *,
    fitting: list[str] | None = None,
) -> str:
    """Return the override with the nearest of the names that the value fits, else the existing names."""
    wrong, *below = missing
    known = [name for name in (names if fitting is None else fitting) if name != wrong]
    near = [name for name in known if name == wrong.lower()] or get_close_matches(wrong, known, 3)
    if near:
        near.sort(key=lambda name: value not in list_options(name, typed))
        return f"{'.'.join([*section, near[0], *below])}={value}"
    if not section:
        return type_command("--help for the list of settings")
    if below and names and section in (["callbacks"], ["metrics"], ["logger"]):
        key = f"{'.'.join([*section, '<name>', *below])}"
        return f"{key}={value}, where <name> is one of {' '.join(names)}"
    offered = " ".join(f"{'.'.join([*section, name])}=" for name in names)
    return f"one of {offered}" if offered else f"the same command without {'.'.join([*section, *missing])}"


def get_choice(group: str, config: Any) -> str:
    """Return the choice for a group as typed, `default` or `[csv,wandb]`; Hydra does not record lists."""
    typed = find_typed_choice(group, config.hydra.overrides.task)
    return typed if typed is not None else str(config.hydra.runtime.choices[group]).replace("'", "")


def _find_sections_with(name: str, config: Any) -> list[str]:
    """Return the sections, and those in them, that have a setting of this name; outer ones first.

    Of those, a setting that refers to another one comes last: it is that one which is typed.
    """
    found = [key for key in _list_sections(config) if name in OmegaConf.select(config, key)]
    refers = {key: bool(REFERENCE.fullmatch(str(OmegaConf.select(config, key)._get_node(name)))) for key in found}
    return sorted(found, key=lambda key: (key.count("."), refers[key]))


def _has_setting(key: str, config: Any) -> bool:
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(config, section) if section else config
    return OmegaConf.is_dict(node) and name in node


def _list_sections(node: Any, path: str = "") -> list[str]:
    """Return the keys of all sections in a node, which may itself be none."""
    names = [name for name in node if not OmegaConf.is_missing(node, name)] if OmegaConf.is_dict(node) else []
    found: list[str] = []
    for name in names:
        if OmegaConf.is_dict(child := node._get_node(name)) and not child._is_none() and not child._is_interpolation():
            found += [f"{path}{name}", *_list_sections(child, f"{path}{name}.")]
    return found


def _find_options(
    override: Override, config: Any, section: list[str], missing: list[str], typed: Sequence[str]
) -> list[str]:
    """Return the options of a group with a key that the chosen one lacks; none if the value disables it.

    None of the modes if one was typed: another one does something else.
    """
    asks = not override.is_delete() and override.value() not in (False, None)
    if len(section) != 1 or missing[0] in config[section[0]] or not asks:
        return []
    if section == ["mode"] and any(text.startswith("mode=") for text in config.hydra.overrides.task):
        return []
    task = get_choice("task", config) if "task" in config.hydra.runtime.choices else None
    kind = read_sample_kind(config["data"]) if section == ["data"] else None
    options = _options_with(section[0], missing[0], typed, task=task, kind=kind)
    if section == ["loss"]:  # of the same targets; what reads others needs another task
        kinds = {*read_target_kinds(config["loss"])}
        options = [
            each for each in options if kinds & {*read_target_kinds(read_option("loss", each, typed))}
        ] or options
    return options


def _options_with(
    group: str, key: str, typed: Sequence[str], *, task: str | None = None, kind: str | None = None
) -> list[str]:
    """Return the options of a group whose files set a key, the shortest name first.

    Args:
        group: The group.
        key: Setting.
        typed: Overrides of this command line.
        task: Chosen task, for metrics.
        kind: Kind of the samples of the chosen data, for other data: the model reads it.
    """
    options = [option for option in list_options(group, typed) if key in read_option(group, option, typed)]
    if group == "metrics":  # those of another task are computed from what it predicts
        options = [option for option in options if option == task or option not in list_options("task", typed)]
    if group == "data":  # of tasks that a recipe sets with their data
        own = [each for each in options if read_target_kind(read_option(group, each, typed)) not in _OF_RECIPES]
        options = own or options
        alike = [each for each in options if kind and read_sample_kind(read_option(group, each, typed)) == kind]
        options = alike or options
    return sorted(options, key=lambda option: (option != key, len(option), option))[:_MAX_OPTIONS]


def suggest_source(name: str, value: str, config: Any, typed: Sequence[str]) -> str | None:
    """Return the override that gives a setting of data to a source of a mixture; None without a mixture or an owner.

    Args:
        name: Name of the setting.
        value: Its value.
        config: The config, as plain values or not.
        typed: Overrides of this command line.
    """
    sources = (config.get("data") or {}).get("sources") or {}
    if owners := [source for source in sources if name in [*(sources[source] or ())]]:
        return ", or ".join(for_shell(f"data.sources.{source}.{name}={value}") for source in owners)
    options = _options_with("data", name, typed) if sources else []
    new = "data.sources.<new name>"
    return f"{for_shell(f'{new}.{name}={value}')} with +data@{new}={options[0]}" if options else None


def suggest_options(key: str, typed: str, overrides: Sequence[str]) -> str | None:
    """Return the overrides that choose an option of a group with this key; None if no option has it.

    Args:
        key: Dotted key, `model.num_kv_heads`, which the chosen option does not take.
        typed: The override that sets it.
        overrides: Overrides of this command line.
    """
    group, _, name = key.partition(".")
    options = [] if group in _SEVERAL else _options_with(group, name, overrides)
    return ", or ".join(f"{group}={option} {for_shell(typed.lstrip('+'))}" for option in options) or None


def _choose(group: str, options: list[str], config: Any, typed: Sequence[str]) -> list[str]:
    """Return the overrides that choose each of these options, added to the chosen ones if a group allows several."""
    if group == "loss" and "completions" in read_target_kinds(config["loss"]):
        return [f"recipe={option}" for option in options]  # each is of a task of its own
    if not is_list_of_options(group):
        return [f"{group}={option}" for option in options]
    return [suggest_addition(group, options[0], get_choice(group, config), typed)]


def _split_options(chosen: str) -> list[str]:
    return [name.strip() for name in chosen.strip("[]").split(",") if name.strip()]


def _included(group: str, option: str, typed: Sequence[str]) -> set[str]:
    """Return the options that the file of another one includes."""
    return {str(name) for name in read_option(group, option, typed).get("defaults", ())}


@cache
def _read(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def read_option(group: str, option: str, typed: Sequence[str]) -> dict[str, Any]:
    """Return the content of an option's file; empty for a recipe or an unreadable file."""
    paths = [folder / group / f"{option}.yaml" for folder in find_config_folders(typed)]
    path = next((path for path in paths if path.is_file()), paths[0])  # Hydra also takes the first
    try:
        return _read(path)
    except (OSError, ValueError, yaml.YAMLError):  # a broken file is reported where it is composed
        return {}
