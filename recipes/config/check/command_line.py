"""Check each typed override by itself; for those that Hydra cannot compose, suggest the nearest existing name."""

import copy
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Override
from omegaconf import OmegaConf

from recipes.config.cached_compose import compose_options, select_options
from recipes.config.check.composition_errors import (
    COMPOSITION_ERRORS,
    explain_broken_file,
    explain_option,
    explain_override,
    is_broken_file,
)
from recipes.config.check.data import reject_dots
from recipes.config.check.nodes import explain_tokenizer, get_provided
from recipes.config.check.renamed import answer_renamed
from recipes.config.check.sections import COMPOSING, CONF, NODES, SETTINGS, list_groups, suggest_value
from recipes.config.check.strategy import misplaced_offload
from recipes.config.check.suggestions import (
    get_choice,
    includes,
    is_list_of_options,
    list_options,
    read_option,
    suggest_addition,
    suggest_mode,
    suggest_nested,
    suggest_option,
    suggest_setting,
)
from recipes.config.check.text_values import answer_sweep, decimal_point, find_annotation, quote_text
from recipes.config.check.types import takes_any_key
from recipes.config.compose import MODE_OF_SWEEPS, Composed, compose_run, quote_options
from recipes.config.instantiate import OPTUNA, PARTIAL, PLUGINS, TARGET
from recipes.config.overrides import (
    NAME_RULE,
    TYPOGRAPHIC_QUOTES,
    for_shell,
    is_about_sweep,
    parse_or_quote,
    parse_override,
    to_ascii,
)
from recipes.config.resume import compose_recorded, find_deepest, read_resumed_run, select_inherited
from recipes.config.search_path import select_search_path
from recipes.config.signature import TargetNotFoundError, find_signature, read_signature
from recipes.config.traits import DATA_GROUPS, is_place_of_data, is_place_of_model
from recipes.config.trust import find_own_folders
from recipes.errors import ConfigError, type_command

_TOKENIZER = re.compile(r"(data|eval_data)\.(.*\.)?tokenizer")  # of a data source
_KEY = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/-]*")
_GRIDS = ("grid", "default", "none", "null", "grid_search", "gridsearch")
_OPEN = re.compile(r"[+]{0,2}[A-Za-z_][\w.@/-]*=[^\s'\"(\[{]+,")  # the first of several values, with the comma
_OF_COMMAND = re.compile(r"python[\d.]*|(\S*/)?train\.py")


def compose_typed(
    overrides: Sequence[str], *, config_folder: Path = CONF, config_name: str = "config"
) -> tuple[Composed | None, list[ConfigError]]:
    """Compose a run from all valid overrides, and report the invalid ones.

    An argument that a node's target accepts but its YAML does not list (`trainer.benchmark=true`) is added, and text
    that Hydra's grammar would read as something else (`name=2024`, a prompt with a comma) is quoted.

    Returns:
        The run composed without the wrong overrides, None if even that fails; and the errors.
    """
    typed, (overrides, mistakes) = overrides, _reject_deletions(quote_options(overrides))
    where: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
    try:
        composed = compose_run(overrides, **where)
    except (*COMPOSITION_ERRORS, ConfigError):
        try:
            good, invalid = _split_valid(overrides, config_folder, config_name)
            composed, conflicting = _compose_valid(good, where)
        except COMPOSITION_ERRORS as error:
            blamed = _find_blamed(overrides, where)
            return None, [*mistakes, blamed or explain_broken_file(error, config_folder, overrides)]
        except ConfigError as mistake:
            return None, [*mistakes, mistake]
        overrides, mistakes = good, restore_typed([*mistakes, *invalid, *conflicting], typed)
    quoted = [quote_text(override, composed.config) for override in overrides]
    if quoted != list(overrides) and not mistakes:
        composed = compose_run(quoted, **where)
    return composed, mistakes


def restore_typed(mistakes: Sequence[ConfigError], typed: Sequence[str], *, sweeps: bool = False) -> list[ConfigError]:
    """Return the errors of overrides that were quoted for Hydra's grammar, with the overrides as they were typed."""
    quoted = {text: word for word in typed if (text := parse_or_quote(word, sweeps=sweeps)[1]) != word}
    return [
        ConfigError(quoted[mistake.setting], mistake.reason, mistake.fix) if mistake.setting in quoted else mistake
        for mistake in mistakes
    ]


def _find_blamed(overrides: Sequence[str], where: dict[str, Any]) -> ConfigError | None:
    """Return the error in the first override that cannot be composed; None if it lies in a file."""
    for number, override in enumerate(["", *overrides]):
        try:
            compose_run(overrides[:number], **where)
        except ConfigError as mistake:
            return mistake
        except COMPOSITION_ERRORS as error:
            group = override.partition("=")[0]
            is_option = (where["config_folder"] / group).is_dir() and not str(error).startswith("Could not override")
            return None if not override or is_option or is_broken_file(error) else explain_option(override, error)
    return None


def _reject_deletions(overrides: Sequence[str]) -> tuple[list[str], list[ConfigError]]:
    """Split off the deletions of settings and sections that every run has."""
    needed = {*SETTINGS, *list_groups(), *NODES} - {"callbacks"}
    wrong = [text for text in overrides if text.startswith("~") and text[1:].partition("=")[0] in needed]
    keys = [text[1:].partition("=")[0] for text in wrong]
    fixes = [f"the same command without {key}" if key in NODES else suggest_value(key) for key in keys]
    mistakes = [ConfigError(text, "this setting is required", fix) for text, fix in zip(wrong, fixes, strict=True)]
    return [text for text in overrides if text not in wrong], mistakes


def _compose_valid(good: Sequence[str], where: dict[str, Any]) -> tuple[Composed, list[ConfigError]]:
    """Compose overrides whose keys and options exist; report those that still cannot be composed.

    Raises:
        hydra.errors.HydraException: A file is broken: composition fails even without any overrides.
    """
    try:
        return compose_run(good, **where), []
    except (*COMPOSITION_ERRORS, ConfigError):
        kept = select_search_path(good)
        composed = compose_run(kept, **where)
    mistakes: list[ConfigError] = []
    for override in good:
        if override in kept:
            continue
        try:
            composed = compose_run([*kept, override], **where)
        except (*COMPOSITION_ERRORS, ConfigError) as error:
            if (switch := _find_switch(override, kept)) is not None:
                mistakes += _explain_switched_off(override, switch)
                continue
            is_option = (CONF / override.partition("=")[0]).is_dir() and "={" not in override
            if is_option and isinstance(error, ConfigError):
                mistakes.append(ConfigError(f"{override} {error.setting}", error.reason, error.fix))
            elif is_option:
                mistakes.append(explain_broken_file(error, where["config_folder"], good))
            else:
                mistakes.append(explain_override(override, error, composed))
        else:
            kept.append(override)
    return composed, mistakes


def _find_switch(override: str, others: Sequence[str]) -> str | None:
    """Return the override that removes the section of a setting, or switches it off."""
    key = override.lstrip("+~").partition("=")[0]
    for other in others:
        section, _, value = other.lstrip("+~").partition("=")
        if (other.startswith("~") or value in ("null", "false")) and f"{key}.".startswith(f"{section}."):
            return other
    return None


def _explain_switched_off(override: str, switch: str) -> list[ConfigError]:
    """Return the error in a setting of a section that another override switches off; none if it does so again."""
    typed = override.removeprefix("++")
    if (
        typed.partition("=")[2] in ("null", "false")
        and typed.partition("=")[0] == switch.lstrip("+~").partition("=")[0]
    ):
        return []
    return [ConfigError(typed, f"{switch} removes what it is a setting of", f"the same command without {switch}")]


def _split_valid(typed: Sequence[str], folder: Path, name: str) -> tuple[list[str], list[ConfigError]]:
    """Split overrides into valid ones, corrected where the intent is clear, and errors.

    Raises:
        ConfigError: A file of the run that `resume=` names is damaged.
        hydra.errors.HydraException: A file is broken.
    """
    search_path = select_search_path(typed)
    folders = [folder, *find_own_folders(search_path)]
    good = [*search_path]  # before the options in its folders
    values: list[tuple[str, str, Override]] = []
    places: list[tuple[str, str, Override]] = []
    typed, mistakes = join_words(typed)
    for text in typed:
        if text in search_path:
            continue
        override, quoted = parse_or_quote(text)
        if override is None:
            mistakes.append(_explain_word(text))
            continue
        if override.key_or_group == "model" and is_place_of_model(override.package):
            places.append((text, quoted, override))
            continue
        if override.package is not None and folder == CONF and not is_place_of_data(override.package):
            group, option = override.key_or_group, str(override.value())
            if group == "data" and override.package.startswith(tuple(f"{place}." for place in DATA_GROUPS)):
                mistakes.append(reject_dots(override.package, option))
                continue
            fix = f"{group}={option}" if option in list_options(group, typed) else None
            if "/" in group:
                fix = suggest_nested(group, option, compose_options(search_path, folder, name), typed)
            fix = fix or f"{group}=<{' | '.join(list_options(group, typed))}>"
            mistakes.append(ConfigError(text, "the place of a group in the config is fixed", fix))
            continue
        group = override.key_or_group
        is_option = (CONF / group).is_dir() and any((path / group).is_dir() for path in folders)
        is_option = is_option and not override.is_delete()
        if is_option and not isinstance(override.value(), dict):
            mistake = _find_unknown_option(override, quoted, good, folder, name)
            mistakes += [mistake] if mistake else []
            good += [] if mistake else [quoted]
        else:
            values.append((text, quoted, override))
    # the keys that may be set: those of the chosen options, including those of the resumed run
    inherited = _inherit_options([*search_path, *(quoted for _, quoted, _ in values)], good, folder, name)
    for text, quoted, override in places:  # after the option of the task, which says whether it asks a model there
        mistake = _find_wrong_place(text, override, compose_options([*inherited, *good], folder, name), typed)
        mistakes += [mistake] if mistake else []
        good += [] if mistake else [quoted]
    chosen = compose_options([*inherited, *good], folder, name)
    config = _with_typed_targets(chosen, [override for _, _, override in values])
    sources = [mistake.setting for mistake in mistakes if mistake.setting.startswith("+data@")]
    missing = tuple(f"{setting.removeprefix('+data@').partition('=')[0]}." for setting in sources)
    for text, quoted, override in values:
        if f"{override.key_or_group}.".startswith(missing):
            continue  # a setting of what is not there
        if quoted != text and (whole := quote_text(quoted, config, text)) != quoted:  # `[é, b]` is one text here
            quoted, override = whole, parse_override(whole)
        corrected = _correct(quoted, override, config)
        if corrected == quoted and _sets_value(override) and find_deepest(chosen, override.key_or_group.split("."))[2]:
            corrected = f"++{quoted}"  # an argument of a class that is typed in the place of another one
        if override.is_sweep_override() and isinstance(corrected, str) and MODE_OF_SWEEPS not in typed:
            answer = answer_sweep(text, override, config)
            marks = corrected[: len(corrected) - len(corrected.lstrip("+"))]
            corrected = f"{marks}{answer.lstrip('+')}" if isinstance(answer, str) else answer
        if isinstance(corrected, ConfigError):
            mistakes.append(corrected)
        else:
            good.append(corrected)
    return good, mistakes


def _sets_value(override: Override) -> bool:
    return override.is_force_add() is override.is_add() is override.is_delete() is override.is_sweep_override() is False


def _with_typed_targets(config: Any, overrides: Sequence[Override]) -> Any:
    """Return a config with the classes that are typed in the place of others, whose arguments may then be typed."""
    known = None
    for override in filter(_sets_value, overrides):
        key, value = override.key_or_group, override.value()
        section = key.removesuffix(f".{TARGET}")
        is_class = section != key and isinstance(value, str)
        is_node = isinstance(value, dict) and TARGET in value
        deepest, _, missing = find_deepest(config, section.split("."))
        if (is_class or is_node) and (not missing or missing == [name for name in deepest if name in missing]):
            known = known or copy.deepcopy(config)
            OmegaConf.update(known, key, value, merge=True, force_add=True)
    return known or config


def _find_wrong_place(text: str, override: Override, config: Any, typed: Sequence[str]) -> ConfigError | None:
    """Return the mistake in the choice of a frozen model, such as `model@teacher=gpt2`; None: there is none."""
    place, option = str(override.package), str(override.value())
    if option not in list_options("model", typed):
        fix = suggest_option("model", option, typed).replace("model=", f"model@{place}=", 1)
        return ConfigError(text, f"there is no option {option!r} of model", fix)
    if place in config:
        return None
    tasks = []
    for task in list_options("task", typed):
        sections: Any = find_signature(read_option("task", task, typed).get("_target_")).constants
        tasks += [task] if place in sections.get("frozen_sections", ()) else []
    fix = f"task={tasks[0]} {text}" if tasks else f"model={option}"
    return ConfigError(text, f"the task of this run asks no {place}", fix)


def _inherit_options(values: Sequence[str], options: Sequence[str], folder: Path, name: str) -> list[str]:
    """Return the options of the run that `resume=` names, except those that are typed again."""
    resumed = read_resumed_run(values, folder, name)
    if resumed is None:
        return []
    compose_recorded(resumed, folder, name)  # whose errors are not of what is typed now
    inherited, _ = select_inherited(resumed, options, folder, name)
    return select_options(inherited, folder, name)


def _find_unknown_option(
    override: Override, typed: str, others: Sequence[str], folder: Path, name: str
) -> ConfigError | None:
    group = override.key_or_group
    options = list_options(group, others)
    value = override.value()
    chosen = value if isinstance(value, list) else [value]
    unknown = [str(option) for option in chosen if str(option) not in options]
    if not unknown and chosen:
        is_added = override.package is None and (override.is_add() or override.is_force_add())
        return _answer_added_option(typed, group, str(chosen[0]), others, folder, name) if is_added else None
    if not chosen and is_list_of_options(group):
        return None
    if renamed := answer_renamed(typed):
        return renamed
    if override.is_sweep_override():
        return _answer_options(override, typed, others)
    if group == "hydra/sweeper" and unknown[0].lower() in _GRIDS:
        return ConfigError(typed, "a grid is what -m runs without an option", "the same command without it")
    if unknown and (file := _find_misnamed(group, unknown[0], others)):
        fix = f"{typed.partition('=')[0]}={unknown[0]}, after mv {file} {Path(file).with_suffix('.yaml')}"
        return ConfigError(typed, f"there is {file}, and Hydra reads files that end in .yaml", fix)
    fix = suggest_option(group, unknown[0] if unknown else "", others)
    if isinstance(value, list) and len(value) > 1 and "<" not in fix:  # the others stay
        meant = [suggest_option(group, name, others) if name in unknown else f"={name}" for name in map(str, value)]
        names = dict.fromkeys(text.partition("=")[2].partition(" ")[0] for text in meant)
        fix = f"{group}=[{','.join(names)}]" if "<option>" not in names else fix
    if override.package is not None:
        fix = fix.replace(f"{group}=", f"+{group}@{override.package}=", 1)
    return ConfigError(typed, f"the options are {' '.join(options)}", fix)


def _answer_options(override: Override, typed: str, others: Sequence[str]) -> ConfigError:
    """Return the error in several options of a group, separated by commas, for a single run."""
    group = override.key_or_group
    if is_about_sweep(group) or group == "sweep":
        options = " | ".join(name for name in list_options(group, others) if f"{group}={name}" != "sweep=none")
        return ConfigError(typed, "a command takes one option", f"{group}=<{options}>")
    sweep = type_command(f"-m {for_shell(typed)}")
    swept = override.value()
    if is_list_of_options(group) and isinstance(swept, ChoiceSweep):
        chosen = [str(option) for option in swept.list]
        rest = {name: ",".join(other for other in chosen if other != name) for name in chosen}
        wanted = [name for name in chosen if not includes(group, name, rest[name], others)]
        fix = f"'{group}=[{','.join(wanted)}]', or {sweep} to compare them"
        return ConfigError(typed, "several options of a group are a list", fix)
    return ConfigError(typed, "a single run takes one option", sweep)


def _find_misnamed(group: str, option: str, typed: Sequence[str]) -> str | None:
    """Return the file of an option that ends in .yml, which Hydra does not read."""
    files = (path / group / f"{option}.yml" for path in find_own_folders(typed))
    return next((str(file) for file in files if file.is_file()), None)


def join_words(typed: Sequence[str]) -> tuple[list[str], list[ConfigError]]:
    """Split off the words that spaces have made of one override, and a command that is typed twice."""
    whole: list[str] = []
    mistakes = []
    command = [word for word in typed if _OF_COMMAND.fullmatch(word)]
    if command:
        reason = "the command itself is among its settings"
        mistakes.append(ConfigError(" ".join(command), reason, type_command("and the settings, once")))
    waiting = [word for word in typed if word not in command]
    while waiting:
        word, *rest = waiting
        is_key = bool(_KEY.fullmatch(word))
        if is_key and rest and rest[0] == "=" and len(rest) > 1:
            size = 3
        elif (is_key and rest and rest[0][:1] == "=") or (
            _KEY.fullmatch(word[:-1]) and word[-1] == "=" and _is_value(rest)
        ):
            size = 2
        elif _OPEN.fullmatch(word) and _is_value(rest):
            size = 2 + next((place for place, text in enumerate(rest) if not text.endswith(",")), len(rest) - 1)
            if all(_is_value([text]) for text in rest[: size - 1]):
                parts, waiting = waiting[:size], waiting[size:]
                fix = for_shell("".join(parts))
                mistakes.append(ConfigError(" ".join(parts), "there is a space behind a comma", fix))
                continue
            whole.append(word)
            waiting = rest
            continue
        else:
            whole.append(word)
            waiting = rest
            continue
        parts, waiting = waiting[:size], waiting[size:]
        mistakes.append(ConfigError(" ".join(parts), "there is a space beside the =", for_shell("".join(parts))))
    return whole, mistakes


def _is_value(rest: Sequence[str]) -> bool:
    """Return whether the next word can only be the value of the one before: it is no override."""
    return bool(rest) and "=" not in rest[0] and rest[0][:1] not in ("~", "#", "\\") and bool(rest[0].strip())


def _explain_word(text: str) -> ConfigError:
    """Return the error in a word that is no override, with the override that it is meant to be."""
    if not text.strip():
        reason = "an empty word: a variable of the shell that is not set, or a space after a backslash"
        return ConfigError(f"'{text}'", reason, "the same command without it")
    if text.strip()[0] in "#\\":
        reason = "a shell reads # and \\ itself, unless they are quoted or followed by a space"
        return ConfigError(text, reason, "the same command without it")
    if (mode := suggest_mode(text)) is not None:
        return ConfigError(text, "what a run does is typed as its mode", mode)
    if (bare := text.strip(TYPOGRAPHIC_QUOTES)) != text and parse_or_quote(bare)[0] is not None:
        reason = "a shell reads typographic quotes as text: its own are ' and \""
        return ConfigError(text, reason, for_shell(bare))
    if text[0] in "–—−":  # noqa: RUF001  dashes of text processors
        dashes = "-" if len(text) == 2 else "--"
        return ConfigError(text, "it begins with a dash that is no hyphen", f"{dashes}{text[1:]}")
    key, equals, value = (part.strip() for part in text.partition("="))
    if equals and key and " " not in key and text != f"{key}={value}":
        return ConfigError(text, "there is a space beside the =", for_shell(f"{key}={value}"))
    group, slash, option = text.partition("/")
    if slash and (CONF / group).is_dir() and "/" not in option and not equals:
        return ConfigError(text, "an option of a group is typed with =", f"{group}={option.removesuffix('.yaml')}")
    key, colon, value = (part.strip() for part in text.partition(":"))
    if colon and not equals and re.fullmatch(r"[+~]*[\w.]+", key):
        return ConfigError(text, "a setting is typed with =, not with a colon", for_shell(f"{key}={value}"))
    if (plain := _narrow(text)) != text and "=" not in text and _KEY.fullmatch(plain.partition("=")[0]):
        return ConfigError(text, "it has full-width characters, such as ＝ for =", for_shell(plain))  # noqa: RUF001
    key, equals, value = text.partition("=")
    joined = re.sub(r"\.+", ".", key).lstrip(".")
    if equals and joined != key and _KEY.fullmatch(joined) and not joined.endswith("."):
        return ConfigError(text, "the parts of a key are joined by one point each", for_shell(f"{joined}={value}"))
    if equals and not key.isascii():
        return ConfigError(text, NAME_RULE, for_shell(f"{to_ascii(key)}={value}"))
    key_typed = text.partition("=")[0]
    indexed = re.sub(r"\[(\w+)\]", r".\1", key_typed)
    if equals and indexed != key_typed and _KEY.fullmatch(indexed):
        return ConfigError(text, "the parts of a key are joined by points", for_shell(f"{indexed}={value}"))
    named = re.fullmatch(r"(\+{0,2}(?:metrics|callbacks|logger)\.)([\w:/]+)", key_typed)
    if named is not None and value.startswith("{"):
        fix = for_shell(f"{named[1]}{re.sub(r'[:/]', '_', named[2])}={value}")
        return ConfigError(text, NAME_RULE, fix)
    mixed = re.sub(r"[:/]", ".", key_typed)
    if "=" in text and mixed != key_typed and _KEY.fullmatch(mixed):
        fix = for_shell(f"{mixed}={text.partition('=')[2]}")
        return ConfigError(text, "the parts of a key are joined by points", fix)
    groups = [*list_groups(), *COMPOSING[:2]]
    chosen = [group for group in groups if text in list_options(group) and text not in ("none", "default")]
    known = [text] if "." in text and _KEY.fullmatch(text) else get_close_matches(text, [*SETTINGS, *groups], 1)
    fixes = [f"{group}={text}" for group in chosen] or [f"{key}=<value>" for key in known]
    fix = ", or ".join(fixes) or "key=value, or the same command without it"
    return ConfigError(text, "it is not of the form key=value", fix)


def _narrow(text: str) -> str:
    """Return text with the letters and signs of a keyboard in place of their full-width forms."""
    return re.sub("[！-～]", lambda found: chr(ord(found[0]) - 0xFEE0), text)  # noqa: RUF001


def _answer_added_option(
    typed: str, group: str, option: str, others: Sequence[str], folder: Path, name: str
) -> ConfigError:
    """Answer `+group=option`, which Hydra rejects: every group has an option already."""
    if not is_list_of_options(group):
        return ConfigError(typed, f"an option of {group} is already chosen", f"{group}={option}")
    same_group = [*select_search_path(others), *(other for other in others if other.startswith(f"{group}="))]
    now = get_choice(group, compose_options(same_group, folder, name))
    reason = f"{group}={now.replace(' ', '')} is already chosen, and + adds a setting, not an option"
    return ConfigError(typed, reason, suggest_addition(group, option, now, others))


def _correct(typed: str, override: Override, config: Any) -> str | ConfigError:
    """Return the override, with `+` where the target accepts the argument, or the error in it."""
    node, section, missing = find_deepest(config, override.key_or_group.split("."))
    if override.is_force_add():
        return typed
    if override.is_add():
        exists = not missing and not isinstance(override.value(), dict | list)
        if exists and _TOKENIZER.fullmatch(override.key_or_group) and isinstance(override.value(), str):
            return explain_tokenizer(f"+{override.key_or_group}", str(override.value()))
        if exists:
            return ConfigError(typed, "it already exists", typed.lstrip("+"))
        return f"+{typed}" if len(missing) == 1 and _is_free_form(section, config) else typed
    if not missing:
        is_dict = isinstance(override.value(), dict) and not override.is_delete()
        return f"++{typed}" if is_dict else typed  # its keys need not exist; the check of nodes knows which may
    if len(missing) == 1 and _is_free_form(section, config):
        return f"++{typed}"  # a typed dictionary may have it already
    names = [str(name) for name in node if not str(name).startswith("_") and name != "hydra"]
    target = OmegaConf.select(node, "_target_") if OmegaConf.is_dict(node) else None
    target = OPTUNA if str(target).startswith(PLUGINS) else target
    if isinstance(target, str):
        try:
            signature = read_signature(target)
        except TargetNotFoundError:
            return typed
        if len(missing) == 1 and (missing[0] in (*signature.parameters, PARTIAL) or signature.takes_any):
            return f"++{typed}"
        path = ".".join(section)
        if path == "strategy" and not override.is_delete():
            offload = misplaced_offload(node, ".".join(missing), override.value(), typed)
            if offload is not None:
                return offload
        provided = get_provided(path)
        names += [name for name in signature.parameters if name not in {*names, *provided}]
    elif not section:
        names = [*SETTINGS, *names, *list_groups(), *COMPOSING]
    if renamed := answer_renamed(typed):
        return renamed
    if not section and missing[0] in ("stages", "every_stage"):
        pipelines = " | ".join(list_options("pipeline", config.hydra.overrides.hydra))
        return ConfigError(typed, "only a pipeline has stages", f"pipeline=<{pipelines}> {for_shell(typed)}")
    if section == ["hydra", "sweeper"]:
        names = [name for name in names if name != "params"]  # of files
        if missing == ["n_jobs"]:  # of Hydra's own Optuna sweeper
            reason = "the launcher runs the jobs, for every sweeper"
            return ConfigError(typed, reason, f"launcher.max_jobs={typed.partition('=')[2]}")
        if target != OPTUNA and missing[0] in read_signature(OPTUNA).parameters:
            reason = "it is a setting of Optuna, and this sweep is a grid"
            return ConfigError(typed, reason, f"hydra/sweeper=optuna {for_shell(typed)}")
    if override.key_or_group == "hydra.sweeper.direction":
        reason = "the direction is that of the sweep, for every sweeper"
        return ConfigError(typed, reason, f"sweep.direction={typed.partition('=')[2]}")
    fix = suggest_setting(override, decimal_point(typed), config, section, missing, list(dict.fromkeys(names)))
    return ConfigError(typed, f"there is no {override.key_or_group!r}", fix)


def _is_free_form(section: list[str], config: Any) -> bool:
    """Return whether a section is an argument that takes any keys, such as `launcher.directives`; or rules of quality.

    Those have names and limits, which `mode=prepare` checks; `quality=none` has no rule.
    """
    if section == ["quality"]:
        return True
    annotation = find_annotation(config, ".".join(section)) if len(section) > 1 else None
    return annotation is not None and takes_any_key(annotation)
