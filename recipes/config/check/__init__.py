"""Check a config by names, types and arithmetic before anything is built; takes milliseconds, without torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.config.check.activation_checkpoint import check_activation_checkpoint
from recipes.config.check.callbacks import check_callbacks, check_loss_spike
from recipes.config.check.compatibility import (
    check_compatibility,
    check_evaluator,
    check_kinds,
    check_plan_settings,
    check_published_model,
    check_unread,
)
from recipes.config.check.contrastive import check_comparisons
from recipes.config.check.dashboard import PLACES, check_dashboards
from recipes.config.check.data import check_data
from recipes.config.check.devices import check_devices
from recipes.config.check.export import check_export
from recipes.config.check.frozen_models import check_frozen_models
from recipes.config.check.lr_scaling import check_lr_scaling
from recipes.config.check.mesh import check_batch_size, check_mesh, check_moe, check_ranks
from recipes.config.check.metrics import check_metrics, check_readers, check_thresholds, join_missing_classes
from recipes.config.check.nodes import NO_DEFAULT, check_nodes
from recipes.config.check.own_classes import check_classes_of_lightning, check_own_classes
from recipes.config.check.own_options import check_own_options
from recipes.config.check.own_training import check_own_training
from recipes.config.check.parameter_rules import check_parameter_rules
from recipes.config.check.paths import check_paths
from recipes.config.check.policy import check_policy, check_rollout
from recipes.config.check.preference import check_preferences
from recipes.config.check.ranges import check_ranges
from recipes.config.check.renamed import answer_renamed
from recipes.config.check.resumed import check_resumed
from recipes.config.check.reward import check_rewards
from recipes.config.check.sections import NO_SUCH_KEY, check_settings, check_structure
from recipes.config.check.start_from import check_start_from
from recipes.config.check.strategy import check_optimizer, check_strategy
from recipes.config.check.suggestions import suggest_options
from recipes.config.check.transform import check_mixing
from recipes.config.check.vision_language import NULL_SIZES, check_parts, check_vision_language
from recipes.config.resolved import ResolvedRun
from recipes.config.search_path import find_config_folders
from recipes.config.traits import select
from recipes.config.trust import CONF, find_resumed_run
from recipes.errors import ConfigError
from recipes.run_folder import CONFIG_FILE

_NO_ARGUMENT = " has no argument "  # what the check of nodes says
_VARIABLE = re.compile(r"\$\{oc\.env:[^{}]*\}")
_FLAT = ("callbacks._target_=", "logger._target_=")  # a node in place of the section of such nodes
_OF_A_VALUE = ("it takes ", "it must be ", NO_DEFAULT)  # what the checks of types and ranges say


def check_config(run: ResolvedRun, overrides: Sequence[str]) -> list[ConfigError]:
    """Return all errors in a composed run, each at the setting that a value comes from.

    Args:
        run: The run.
        overrides: Overrides typed on this command line, without those of a resumed run.

    Returns:
        The errors in the order of the checks; empty if the run can be built.
    """
    found = _trace_all(_check_all(run, overrides), run.references, run.config)
    return _locate_in_run(found, overrides)


def _locate_in_run(mistakes: Sequence[ConfigError], overrides: Sequence[str]) -> list[ConfigError]:
    """Add file and line to errors that only an edit of the resumed run's config.yaml corrects: a key too many there.

    Nothing that is typed removes it, as what is typed is composed before that file is read.
    """
    run = find_resumed_run(overrides)
    if run is None:
        return [*mistakes]
    lines = (run / CONFIG_FILE).read_text(encoding="utf-8").splitlines()
    typed = [override.lstrip("+").partition("=")[0] for override in overrides]
    located = []
    for mistake in mistakes:
        key = _get_key(mistake)
        name = key.rpartition(".")[2]
        numbers = [number for number, line in enumerate(lines, 1) if re.match(rf"\s*{re.escape(name)}\s*:", line)]
        is_surplus = mistake.reason == NO_SUCH_KEY or _NO_ARGUMENT in mistake.reason
        if is_surplus and numbers and key not in typed:
            where = f", line {numbers[0]}" if len(numbers) == 1 else ""
            fix = f"the same command without {key} in {run / CONFIG_FILE}{where}"
            mistake = ConfigError(mistake.setting, mistake.reason, fix)
        located.append(mistake)
    return located


def _check_all(run: ResolvedRun, overrides: Sequence[str]) -> list[ConfigError]:
    config, choices, references = run.config, run.choices, run.references
    structure = [*check_structure(config, recipe=choices.get("recipe"))]
    if flat := [mistake for mistake in structure if mistake.setting.startswith(_FLAT)]:
        return locate_mistakes(flat, overrides)  # its arguments are among the others, and they among its arguments
    if misplaced := [*check_own_options(run, overrides)]:
        return misplaced  # whose settings the others lack
    if not structure and (of_lightning := [*check_classes_of_lightning(config)]):
        return of_lightning  # all other mistakes are consequences
    frozen = () if any(mistake.setting.startswith("task") for mistake in structure) else run.task.frozen_sections
    found = [*structure, *check_settings(config, models=frozen), *check_nodes(config), *check_parameter_rules(config)]
    if not structure:  # the others read its sections
        wrong_classes = [*check_callbacks(config)]
        sections = tuple(mistake.setting.partition("_target_=")[0] for mistake in wrong_classes)
        # the arguments of a class that cannot be used are not worth a correction
        found = [mistake for mistake in found if not mistake.setting.removeprefix("no ").startswith(sections)]
        found += [*wrong_classes, *check_data(config), *check_metrics(config), *check_own_classes(config)]
    found = join_missing_classes(config, found)
    dashboards = [*check_dashboards(config)]
    if dashboards:  # whose sections the others refer to
        found = [mistake for mistake in found if _get_key(mistake) not in PLACES]
    unread = [] if structure else [*check_plan_settings(run, overrides)]
    unread_keys = {_get_key(mistake) for mistake in unread}
    found = [*(mistake for mistake in found if _get_key(mistake) not in unread_keys), *unread]
    mistakes = [answer_renamed(mistake.setting) or mistake for mistake in found]
    mismatches = [] if structure else [*check_rollout(config, choices)] or [*check_kinds(config, choices, overrides)]
    if mismatches and (of_weights := [*check_resumed(run)]):
        mismatches = of_weights  # other data does not help
    if mismatches:
        # data of the wrong kind has no tokenizer or sequence length, metrics no classes: consequences, not mistakes
        consequences = ("data.", "tokenizer.", "metrics.", "no metrics.")
        mistakes = [m for m in mistakes if not m.setting.startswith(consequences)]
    mistakes = [*locate_mistakes(_trace_all(mistakes, references, config), overrides), *dashboards]
    if structure or mismatches:
        return [*mistakes, *mismatches]  # the checks below read these sections
    unreadable, wrong_parts = [*check_published_model(config["model"])], [*check_parts(config["model"])]
    if unreadable or wrong_parts or any(_get_key(m) == "model.name" for m in mistakes):
        # what names a model gives its sizes and its tokenizer
        mistakes = [m for m in mistakes if m.setting not in ("tokenizer.name=null", *NULL_SIZES)]
        mistakes = [*mistakes, *unreadable] if mistakes else []
        mistakes += wrong_parts
    scaling = [*check_lr_scaling(config, choices, overrides)]
    if scaling:  # without a reference point there is no learning rate: a consequence as well
        mistakes = [m for m in mistakes if not m.setting.startswith("optimizer.lr=")]
    ranges = locate_mistakes(_trace_all([*check_ranges(config)], references, config), overrides)
    ranges = [mistake for mistake in ranges if _get_key(mistake) not in unread_keys]
    absent = [_get_key(mistake) for mistake in mistakes if mistake.reason == NO_DEFAULT]
    if len(mistakes) > len(absent):
        # the checks below compute with these values and would only report the same mistakes again
        return [*mistakes, *scaling, *ranges]
    wrong_ranks = [*check_ranks(run)]
    has_ranks = not wrong_ranks and run.num_nodes >= 1
    later = [
        *wrong_ranks,
        *check_policy(run, has_ranks=has_ranks),  # before that of the batch, whose sizes may split its groups
        *check_batch_size(run, has_ranks=has_ranks),
        *check_mixing(run, has_ranks=has_ranks),
        *check_mesh(run, has_ranks=has_ranks),
        *check_moe(run, has_ranks=has_ranks),
        *check_compatibility(run),
        *check_strategy(run),
        *check_activation_checkpoint(run),
        *check_devices(run),
        *check_optimizer(run),
        *check_loss_spike(run, world_size=run.ranks.world_size if has_ranks else 1),
        # in a mode that acts on a finished run, its metrics may be others, and nothing reads them
        *(() if run.mode.needs_checkpoint else check_readers(config)),
        *check_thresholds(config),
        *check_frozen_models(run),
        *check_preferences(run),
        *check_comparisons(run),
        *check_vision_language(run),
        *check_evaluator(run),
        *check_export(run),
        *check_own_training(run),
        *check_unread(run, overrides),
        *check_rewards(run, overrides),
        *check_resumed(run),
        *check_start_from(run),
        *check_paths(run, overrides),
    ]
    out_of_range = [mistake.setting for mistake in ranges]  # what is computed from these values is a consequence
    later = [m for m in later if m.setting not in out_of_range and not any(s in m.reason for s in out_of_range)]
    # an option whose setting is absent is not worth another correction
    later = [m for m in later if not any(f"{key}.".startswith(f"{_get_key(m)}.") for key in absent)]
    return [*mistakes, *scaling, *ranges, *later]


def _trace_all(
    mistakes: Sequence[ConfigError], references: Mapping[str, str], config: Mapping[str, Any]
) -> list[ConfigError]:
    """Report each error once, at the setting that its value comes from; drop those of a value that is missing."""
    missing = tuple(f"{_get_key(mistake)}." for mistake in mistakes if mistake.setting.startswith("no "))
    traced: dict[str, ConfigError] = {}
    for mistake in mistakes:
        origins = [*_follow(_get_key(mistake), references)]
        is_consequence = any(f"{origin}.".startswith(missing) for origin in origins[1:])
        if not is_consequence and (mistake.setting.startswith("no ") or not f"{origins[0]}.".startswith(missing)):
            moved = _move(mistake, [origin for origin in origins if _exists(config, origin)][-1:])
            traced.setdefault(moved.setting, moved)
    return [*traced.values()]


def _move(mistake: ConfigError, origin: Sequence[str]) -> ConfigError:
    """Return the error for the setting that its key refers to: `${seq_len}` of `data.seq_len`."""
    key = _get_key(mistake)
    is_of_value = mistake.reason.startswith(_OF_A_VALUE) and mistake.setting.count("=") <= 1
    if not is_of_value or not origin or origin[0] == key:  # of the key itself, or of several settings
        return mistake
    pattern = re.compile(rf"(?<![\w.]){re.escape(key)}(?!\w)")
    return type(mistake)(pattern.sub(origin[0], mistake.setting), mistake.reason, pattern.sub(origin[0], mistake.fix))


def _exists(config: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.rpartition(".")
    node = select(config, section) if section else config
    return isinstance(node, Mapping) and name in node


def _follow(key: str, references: Mapping[str, str]) -> Iterator[str]:
    """Yield a key, and each setting that it, or a section that it is in, refers to in turn."""
    seen: set[str] = set()
    while key not in seen:
        seen.add(key)
        yield key
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            section = ".".join(parts[:length])
            if section in references:
                key = ".".join([references[section], *parts[length:]])
                break


def locate_mistakes(mistakes: Sequence[ConfigError], overrides: Sequence[str]) -> list[ConfigError]:
    """Add the file and line to correct to errors in what was not typed.

    Args:
        mistakes: Errors about a key, `key=value`.
        overrides: Command-line overrides.
    """
    typed = [override.lstrip("+~").partition("=") for override in overrides]
    run = find_resumed_run(overrides)
    located: list[ConfigError] = []
    for mistake in mistakes:
        key = _get_key(mistake)
        is_typed = any(name == key or (key.startswith(f"{name}.") and value[:1] == "{") for name, _, value in typed)
        is_added = any(word.startswith("+") and word.lstrip("+").startswith(f"{key}=") for word in overrides)
        section = key.rpartition(".")[0]
        is_in_added = any(  # `+callbacks.mine._target_=…`, or one of its arguments
            word.startswith("+") and word.lstrip("+").startswith((f"{section}=", f"{section}._target_=")) and section
            for word in overrides
        )
        setting, reason, fix = mistake.setting, mistake.reason, mistake.fix
        text = next((text for name, _, text in reversed(typed) if name == key), "")
        if text and reason.startswith(_OF_A_VALUE) and setting.startswith(f"{key}=") and setting.count("=") == 1:
            setting = f"{key}={text}"  # 1e3 instead of 1000.0
            if _VARIABLE.fullmatch(text):
                reason, fix = f"{reason}, and a variable is text", f"'{key}=${{oc.decode:{text}}}'"
        is_of_section = fix.lstrip("'~+").startswith(f"{section}." if section else "")  # else it is typed, not edited
        line = None
        # what an option asks for is typed, not written into its file
        if not is_typed and not is_in_added and is_of_section and reason != NO_DEFAULT:
            line = (run and _find_line_in_run(run, key, mistake)) or _find_line(mistake, key, overrides)
        if line:
            place, is_quoted = line
            fix = f"{fix} ({place})"
            reason = f"{reason}, and in quotes it is text" if is_quoted and reason.startswith("it takes ") else reason
        whole = next((word for word in overrides if word.lstrip("+").partition("=")[0] == key), None)
        if whole and setting == f"{key}=…":
            setting = whole
        if is_added and "has no argument" in reason and (choices := suggest_options(key, whole or "", overrides)):
            fix = choices
        deleted = next((word for word in overrides if word.startswith(f"~{key}=")), None)
        if deleted and setting.startswith("no "):
            fix = f"the same command without {deleted}"
        if _NO_ARGUMENT in reason and is_typed and not text and fix.startswith(f"'~{key}'"):  # within a {…}
            fix = f"the same command without {key.rpartition('.')[2]} in {section}"
        if f"~{key}" in overrides:  # typed instead of the deletion, the key is there
            fix = fix.removeprefix("+")
        elif is_added and fix.startswith(f"'~{key}'"):
            fix = "the same command without it"
        elif (is_added and fix.startswith(f"{key}=")) or (is_in_added and fix.startswith(f"{section}.")):
            fix = f"+{fix}"
        located.append(ConfigError(setting, reason, fix))
    return located


def _get_key(mistake: ConfigError) -> str:
    return re.split(r"[=\[]", mistake.setting.removeprefix("no "), maxsplit=1)[0]


def _find_line_in_run(run: Path, key: str, mistake: ConfigError) -> tuple[str, bool] | None:
    """Return `in run/config.yaml, line 4`, without a line for what it lacks, and whether the value is quoted there.

    None if the value is not from there.
    """
    import yaml

    file = run / CONFIG_FILE
    if mistake.setting.startswith("no "):
        return f"in {file}", False
    node = yaml.compose(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for part in key.split("."):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for name, value in entries if name.value == part), None)
    if not isinstance(node, yaml.ScalarNode) or node.value != mistake.setting.partition("=")[2]:
        return None
    return f"in {file}, line {node.start_mark.line + 1}", node.style in ("'", '"')


def _find_line(mistake: ConfigError, key: str, typed: Sequence[str]) -> tuple[str, bool] | None:
    """Return `in conf/model/mine.yaml, line 4`, and whether the value is quoted there.

    None unless exactly one line of all options sets the last part of the key, or one of an own folder sets it to this
    value.
    """
    pattern = re.compile(rf"\s*{re.escape(key.rpartition('.')[2])}\s*:\s*(.*?)\s*(?:#.*)?")
    lines = [
        (f"in {path.relative_to(CONF.parent) if folder == CONF else path}, line {number}", match[1])
        for folder in find_config_folders(typed)
        for path in sorted(folder.rglob("*.yaml"))
        if _may_set(
            key, text := path.read_text(encoding="utf-8-sig", errors="replace"), path.parent.relative_to(folder)
        )
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := pattern.fullmatch(line))
    ]
    value = mistake.setting.partition("=")[2]
    own = [line for line in lines if not line[0].startswith(f"in {CONF.name}/")]
    exact = [(place, written) for place, written in own if value and written.strip("\"'") == value]
    found = exact if len(exact) == 1 else lines
    return (found[0][0], found[0][1][:1] in ("'", '"') if found[0][1] else False) if len(found) == 1 else None


def _may_set(key: str, text: str, group: Path) -> bool:
    """Return whether a YAML file may set a key: one of its group or of the whole config, and of the same member."""
    section, _, rest = key.partition(".")
    if "@package _global_" in text or group == Path():
        return True
    member = rest.partition(".")[0] if section in ("callbacks", "logger") else ""
    return group.parts[0] == section and (not member or re.search(rf"^{re.escape(member)}:", text, re.M) is not None)
