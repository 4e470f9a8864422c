"""Check every config node against the signature of its target: unknown, missing and mistyped arguments."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from recipes.config.check.deepspeed import misplaced_offload
from recipes.config.check.types import describe, matches_type, placeholder, to_setting
from recipes.config.signature import Signature, TargetNotFoundError, list_names, read_signature
from recipes.config.traits import list_nodes
from recipes.errors import ConfigError

# null means that build.py derives the value, regardless of the target's annotation
_DERIVED = {"trainer.accumulate_grad_batches"}
# what build.py passes to partial nodes: objects, and settings shared by several nodes
PROVIDED: dict[str, set[str]] = {
    "optimizer": {"model"},
    "scheduler": {"step"},
    "strategy": {"devices", "precision", "checkpoint_io", "mesh"},
    "task": {
        "make_model",
        "make_optimizer",
        "schedule",
        "convert_model",
        "activation_checkpoint",
        "compile_mode",
        "loss_chunk_tokens",
        "scales_loss",
        "clipping",
        "ema_decay",
        "label_smoothing",
        "z_loss",
        "seed",
        "metrics",
    },
    "loader": {"source", "eval_sources", "accumulation", "seed", "eval_samples"},
    "logger.csv": {"run_folder"},
    "logger.tensorboard": {"run_folder"},
    "logger.wandb": {"run_folder"},
    "callbacks.answer_check.score": {"given", "expected"},
    "mode": {"run", "composed"},
    "mode.answers.score": {"given", "expected"},
    "mode.diagnose_run": {"path", "steps_per_epoch"},
    "mode.find_peak": {"device_name", "kind"},
    "mode.write": {"folders", "path"},
    "mode.write_page": {"path", "plan", "lines", "title", "text", "figures", "results", "images", "report", "about"},
    "sweep.compare": {"folders", "path", "sort", "dashboard"},
}
# sections that refer to another one, `evaluator: ${evaluator}`, where mistakes are reported
_REPEATED = ("mode.evaluator",)
_INSTANTIATE = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def check_nodes(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check every node of a config that has a `_target_`, nested ones included."""
    for path, node in list_nodes(config):
        if not is_repeated(path):
            yield from _check_node(path, node)


def is_repeated(path: str) -> bool:
    """Return whether a node is, or lies in, a section that refers to another one."""
    return any(path == section or path.startswith(f"{section}.") for section in _REPEATED)


def _check_node(path: str, node: Mapping[str, Any]) -> Iterator[ConfigError]:
    target: str = node["_target_"]
    try:
        signature = read_signature(target)
    except TargetNotFoundError as error:
        yield ConfigError(f"{path}._target_={target}", str(error), _suggest_target(path, target))
        return
    provided = PROVIDED[path] if path in PROVIDED else set()
    for key, value in node.items():
        if key in _INSTANTIATE:
            continue
        if key in provided:
            where = f"{path}.{key}"
            yield ConfigError(f"{where}={to_setting(value)}", "build.py provides it", f"nothing for {where}")
            continue
        if key in signature.parameters:
            yield from _check_value(f"{path}.{key}", value, signature, key)
        elif not signature.takes_any:
            where = f"{path}.{key}"
            shown = f"{where}={to_setting(value)}"
            offload = misplaced_offload(node, key, value, shown) if path == "strategy" else None
            yield offload or _unknown(where, value, signature, target)
    for key, parameter in signature.parameters.items():
        if parameter.required and key not in node and key not in provided:
            yield ConfigError(f"no {path}.{key}", f"{_get_name(target)} needs it", f"+{path}.{key}=<value>")


def _suggest_target(path: str, target: str) -> str:
    """Return an option of the group or, for groups without options, a name similar to the target."""
    group, _, entry = path.partition(".")
    if not entry:
        return f"{path}=<an option of conf/{path}/>"
    module, _, name = target.rpartition(".")
    try:
        near = get_close_matches(name, list_names(module), 1)
    except TargetNotFoundError:
        near = []
    return f"{path}._target_={module}.{near[0]}" if near else f"{path}._target_=<a class>, as in conf/{group}/"


def _check_value(where: str, value: object, signature: Signature, key: str) -> Iterator[ConfigError]:
    if value is None and where in _DERIVED:
        return
    annotation = signature.parameters[key].annotation
    blank = placeholder(annotation) if annotation is not None else "value"
    if value == "???":
        yield ConfigError(f"no {where}", "it has no default", f"{where}=<{blank}>")
    elif annotation is not None and not _is_node(value) and not matches_type(value, annotation):
        yield ConfigError(f"{where}={to_setting(value)}", f"it takes {describe(annotation)}", f"{where}=<{blank}>")


def _unknown(where: str, value: object, signature: Signature, target: str) -> ConfigError:
    parent, _, key = where.rpartition(".")
    shown = "…" if isinstance(value, dict | list) else to_setting(value)
    near = get_close_matches(key, signature.parameters, 1)
    fix = f"{parent}.{near[0]}={shown}" if near else f"'~{where}' to remove it"
    return ConfigError(f"{where}={shown}", f"{_get_name(target)} has no argument {key!r}", fix)


def _is_node(value: object) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _get_name(target: str) -> str:
    return target.rpartition(".")[2]
