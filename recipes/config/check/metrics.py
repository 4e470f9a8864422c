"""Check the validation metrics: their nodes, and settings that name a metric that no validation computes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from recipes.config.check.types import to_setting
from recipes.config.signature import find_signature
from recipes.config.traits import list_data, select
from recipes.errors import ConfigError

_PREFIX = "val/"
# settings that name a metric -> they are in use if one of these is set
_READERS = {
    "checkpoint.monitor": ("checkpoint.keep_best",),
    "scheduler.monitor": ("scheduler.monitor",),
    "callbacks.early_stop.monitor": (
        "callbacks.early_stop.patience",
        "callbacks.early_stop.stopping_threshold",
        "callbacks.early_stop.divergence_threshold",
    ),
}
# settings that name a metric -> the one that says which direction is better
_DIRECTIONS = {
    "checkpoint.monitor": "checkpoint.mode",
    "scheduler.monitor": "scheduler.mode",
    "callbacks.early_stop.monitor": "callbacks.early_stop.mode",
}
# the last part of a name says which direction is better; of any other name it is not known
_HIGHER_IS_BETTER = re.compile(
    r"accuracy|exact_match|auroc|f1|recall|precision|bleu|rouge|reward|(^|_)acc($|_)|per_second|mfu"
)
_LOWER_IS_BETTER = re.compile(r"loss|perplexity|error")


def check_metrics(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that each metric is a section with a `_target_`, and that the model has enough classes for top-k."""
    metrics, model = config.get("metrics"), config.get("model")
    for name, node in dict(metrics if isinstance(metrics, Mapping) else {}).items():
        if name == "loss":
            yield ConfigError("metrics.loss=…", "every validation computes val/loss", "another name for this metric")
        elif node is not None and not (isinstance(node, Mapping) and "_target_" in node):
            shown, what = f"metrics.{name}={to_setting(node)}", "a metric is a section with a _target_"
            yield ConfigError(shown, what, _suggest_metric(name, node, _count_classes(model)))
        elif node is not None:
            top_k, num_classes = node.get("top_k"), _count_classes(model)
            expected = node.get("num_classes")
            if isinstance(expected, int) and num_classes is not None and expected < num_classes:
                yield ConfigError(
                    f"metrics.{name}.num_classes={expected}",
                    f"the model has {num_classes} classes",
                    f"metrics.{name}.num_classes={num_classes}",
                )
            if isinstance(top_k, int) and num_classes is not None and top_k > num_classes:
                yield ConfigError(
                    f"metrics.{name}.top_k={top_k}", f"the model has {num_classes} classes", f"metrics.{name}=null"
                )


def join_missing_classes(config: Mapping[str, Any], mistakes: Sequence[ConfigError]) -> list[ConfigError]:
    """Replace the mistakes of all metrics that lack the number of classes with one of the model, which has none."""
    ask = re.compile(r"metrics\.([\w-]+)\.(num_classes|num_labels)=null")
    asking = [found[1] for mistake in mistakes if (found := ask.fullmatch(mistake.setting))]
    target = str(select(config, "model._target_"))
    if not asking or _count_classes(config.get("model")) is not None:
        return [*mistakes]
    signature = find_signature(target)
    named = " and ".join(f"metrics.{name}" for name in asking)
    reason = f"{named} need{'s' if len(asking) == 1 else ''} the number of classes"
    if "num_classes" in signature.parameters or signature.takes_any:
        mistake = ConfigError("no model.num_classes", reason, "model.num_classes=<whole number>")
    else:
        reason = f"{reason}, and {target.rpartition('.')[2]} has no argument num_classes"
        fix = "num_classes: int = <whole number> in the __init__ of that class, or metrics=none"
        mistake = ConfigError(f"model._target_={target}", reason, fix)
    return [*(each for each in mistakes if not ask.fullmatch(each.setting)), mistake]


def _suggest_metric(name: str, node: object, num_classes: int | None) -> str:
    """Return the override for what is meant by a metric that is no section with a `_target_`."""
    if isinstance(node, str) and "." in node:  # the class itself, whose other arguments are not known
        classes = f", num_classes: {num_classes}" if "Multiclass" in node and num_classes is not None else ""
        return f"'+metrics.{name}={{_target_: {node}{classes}}}'" if classes else f"+metrics.{name}._target_={node}"
    if isinstance(node, Mapping) and len(node) == 1:
        [(inner, section)] = node.items()
        if isinstance(section, Mapping) and "_target_" in section:
            settings = ", ".join(f"{key}: {to_setting(value)}" for key, value in section.items())
            return f"'+metrics.{name}_{inner}={{{settings}}}'"
    return f"metrics.{name}=null"


def check_readers(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that a metric named by a setting is computed, unless external code may log it."""
    for setting in _READERS:
        if _is_used(config, setting):
            yield from find_unknown_metric(config, setting, select(config, setting))


def check_thresholds(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that the goal of `callbacks.early_stop` is better than its limit: every value is beyond one otherwise."""
    section = "callbacks.early_stop"
    goal, limit = (select(config, f"{section}.{name}") for name in ("stopping_threshold", "divergence_threshold"))
    mode = select(config, f"{section}.mode")
    if not isinstance(goal, int | float) or not isinstance(limit, int | float):
        return
    if goal > limit if mode == "min" else goal < limit:
        yield ConfigError(
            f"{section}.stopping_threshold={goal} {section}.divergence_threshold={limit}",
            f"with {section}.mode={mode} every value is beyond one of them",
            f"{section}.stopping_threshold={limit} {section}.divergence_threshold={goal}",
        )


def find_unknown_metric(config: Mapping[str, Any], setting: str, name: object) -> Iterator[ConfigError]:
    """Yield the error in a setting that names a validation metric which is not computed.

    Other prefixes are those of callbacks, and of training.
    """
    is_of_validation = isinstance(name, str) and (name.startswith(_PREFIX) or "/" not in name)
    if not is_of_validation or logs_anything(config):
        return
    computed = list(dict.fromkeys(_list_computed(config)))
    if name not in computed:
        near = (get_close_matches(str(name), computed, 1) or computed)[0]
        yield ConfigError(
            f"{setting}={name}", f"validation computes {' '.join(computed)}", f"{setting}={near}, or +metrics.…"
        )


def logs_anything(config: Mapping[str, Any]) -> bool:
    """Return whether a task, a LightningModule or a callback is of another package, which logs what it likes."""
    logging = [node for node in (config.get("callbacks") or {}).values() if node is not None] + [config["task"]]
    logging += [node for node in (config["task"].get("module"),) if isinstance(node, Mapping)]
    return not all(str(node.get("_target_")).startswith(("recipes.", "callbacks.")) for node in logging)


def find_wrong_directions(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield the settings by which the worst would count as the best; only a warning, as many have only a name."""
    for setting, direction in _DIRECTIONS.items():
        name, wanted = select(config, setting), select(config, direction)
        if not _is_used(config, setting):
            continue
        declared = _read_measures(config).get(str(name).removeprefix(_PREFIX))
        if mistake := find_wrong_direction(setting, name, direction, wanted, is_high=declared):
            yield mistake


def _is_used(config: Mapping[str, Any], setting: str) -> bool:
    if setting.startswith("checkpoint.") and config.get("save_every") is config.get("save_every_minutes") is None:
        return False
    values = {switch: select(config, switch) for switch in _READERS[setting]}
    return any(value is not None if name.endswith("_threshold") else value for name, value in values.items())


def find_wrong_direction(
    setting: str, name: object, direction: str, wanted: object, *, is_high: bool | None = None
) -> ConfigError | None:
    """Return what is wrong with the direction of a metric; None if nothing is, or its direction is not known.

    Args:
        setting: The setting that names the metric.
        name: The metric.
        direction: The setting of its direction: `min` or `minimize`, `max` or `maximize`.
        wanted: Its value.
        is_high: Whether a higher value is better, as declared; None: the name says it, if anything does.
    """
    last = str(name).rpartition("/")[2]
    is_low = not is_high
    if is_high is None:
        is_high, is_low = _HIGHER_IS_BETTER.search(last) is not None, _LOWER_IS_BETTER.search(last) is not None
    other = {"min": "max", "max": "min", "minimize": "maximize", "maximize": "minimize"}.get(str(wanted))
    if is_high == is_low or other is None or str(wanted).startswith("max" if is_high else "min"):
        return None
    reason = f"{direction}={wanted} takes the worst for the best: a {'higher' if is_high else 'lower'} {last} is better"
    return ConfigError(f"{setting}={name}", reason, f"{direction}={other}")


def is_loss_validated(config: Mapping[str, Any]) -> bool:
    """Return whether validations compute the loss, so that there is a val/loss: completions have none."""
    return bool(find_signature(str(select(config, "loss._target_"))).constants.get("is_validated", True))


def _list_computed(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the validation metrics: of the split, of each source of a mixture, of each additional validation."""
    names = ["loss", *_read_measures(config)] if is_loss_validated(config) else []
    names += [name for name, node in config.get("metrics", {}).items() if node is not None]
    yield from (_PREFIX + name for name in names)
    if isinstance(select(config, "task.rewards"), Mapping):  # without any, which is an error of its own
        yield f"{_PREFIX}reward"
    declared: Any = find_signature(str(select(config, "task._target_"))).constants.get("validation_metrics", ())
    names += declared
    yield from (_PREFIX + name for name in declared)
    for node in (config.get("callbacks") or {}).values():
        yield from (_PREFIX + name for name in _list_of_callback(node or {}))
    for section, _ in list_data(config):
        group, _, member = section.rpartition(".")
        if group == "eval_data":
            yield from (f"{_PREFIX}{member}/{name}" for name in names)
        elif group:
            yield f"{_PREFIX}{member}/loss"


def _read_measures(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return what the loss logs beside itself, each with whether a higher value is better."""
    constants: dict[str, Any] = find_signature(str(select(config, "loss._target_"))).constants
    higher = constants.get("higher_is_better", ())
    return {name: name in higher for name in constants.get("measures", {})}


def _list_of_callback(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the validation metrics that the class of a callback declares, and those of its rewards."""
    constants: Any = find_signature(str(node.get("_target_"))).constants
    is_on = "validates_with" not in constants or node.get(constants["validates_with"]) is not None
    yield from constants.get("validation_metrics", ()) if is_on else ()
    functions = select(node, "rewards.functions")
    names = [name for name, each in functions.items() if each is not None] if isinstance(functions, Mapping) else []
    yield from ["reward", *(f"reward/{name}" for name in names)] if names else []


def _count_classes(model: object) -> int | None:
    number = model.get("vocab_size", model.get("num_classes")) if isinstance(model, Mapping) else None
    return number if isinstance(number, int) else None
