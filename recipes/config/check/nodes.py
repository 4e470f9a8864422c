"""Check every config node against the signature of its target: unknown, missing and mistyped arguments."""

import ast
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from recipes.config.check.sections import NODES, list_groups
from recipes.config.check.strategy import misplaced_offload
from recipes.config.check.types import describe, matches_type, placeholder, suggest, to_setting
from recipes.config.instantiate import PARTIAL, RULES, TARGET
from recipes.config.overrides import NAME_RULE, for_shell, to_ascii
from recipes.config.signature import (
    Parameter,
    Signature,
    TargetNotFoundError,
    find_signature,
    list_names,
    locate_code,
    read_signature,
)
from recipes.config.traits import list_nodes
from recipes.config.trust import CONF, COPIES
from recipes.errors import ConfigError

# null means that build.py derives the value, regardless of the target's annotation
_DERIVED = {"trainer.accumulate_grad_batches"}
# what build.py passes to partial nodes: objects, and settings shared by several nodes
PROVIDED: dict[str, set[str]] = {
    "optimizer": {"model"},
    "scheduler": {"step"},
    "scheduler.torch": {"optimizer"},
    "strategy": {"devices", "precision", "checkpoint_io", "mesh"},
    "task": {
        "make_model",
        "make_optimizer",
        "schedule",
        "convert_model",
        "activation_checkpoint",
        "compile_mode",
        "loss",
        "scales_loss",
        "clipping",
        "ema_decay",
        "seed",
        "metrics",
        "precision",
    },
    "loader": {"source", "eval_sources", "loss", "accumulation", "seed", "eval_samples"},
    "logger.csv": {"run_folder"},
    "logger.tensorboard": {"run_folder"},
    "logger.wandb": {"run_folder"},
    "callbacks.generation_eval.reward": {"given", "expected"},
    "mode": {"run", "resolved"},
    "mode.answers.reward": {"given", "expected"},
    "mode.diagnose_run": {"path", "steps_per_epoch"},
    "mode.find_peak": {"device_name", "kind"},
    "mode.write": {"folders", "path"},
    "mode.write_stages": {"title", "stages", "path", "dashboard"},
    "mode.write_page": {"path", "plan", "lines", "title", "text", "figures", "results", "images", "report", "about"},
    "mode.page": {"run_folder"},
    "sweep.compare": {"folders", "path", "sort", "dashboard"},
    "hydra.sweeper.sampler": {"seed"},
}
# sections that refer to another one, `evaluator: ${evaluator}`, where mistakes are reported
NO_DEFAULT = "it has no default"  # of a setting that an option leaves to be typed
_REPEATED = tuple(".".join(place) for place in COPIES)
# groups whose target may be of another package -> what each of them is given by build.py
_OF_ANY_PACKAGE = {"optimizer": "the model", "scheduler": "the step", "scheduler.torch": "an optimizer"}
_PACKAGES = (
    *("recipes", "callbacks", "lightning", "torch", "torchmetrics", "torchvision", "transformers"),
    *("optuna", "deepspeed"),
)
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_HYDRA_ONLY = ("_args_", "_convert_", "_recursive_")  # of Hydra's own instantiation, which builds no node here
# what to type for a text, by the setting; in a data source by its last name
_EXAMPLES = {
    "path": "<file, folder or glob>",
    "val_path": "<file, folder or glob>",
    "train": "{_target_: <module.Class>}",
    "val": "{_target_: <module.Class>}",
    "module": "{_target_: <module.Class>}",
    "task.module": "{_target_: <module.Class>}",
    "scheduler.torch": "{_target_: torch.optim.lr_scheduler.StepLR, step_size: 100}",
    "template": "auto",
    "model.name": "<folder or hub id>",
    "tokenizer.name": "<folder or hub id>",
    "mode.output": "<new folder>",
    "reward.mine.path": "<file.py>:<function>",
    "reward.model.pretrained": "<exported reward model, or its run>",
    "reward.regex.pattern": "<regular expression>",
}


def check_nodes(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check every node of a config that has a `_target_`, nested ones included."""
    sections = (*list_groups(), *NODES)  # any other is reported by the check of sections
    yield from check_node_tree({name: section for name, section in config.items() if name in sections})


def check_node_tree(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check every node in these sections, whatever their names."""
    nodes = dict(list_nodes(config))
    for path, node in nodes.items():
        if not is_repeated(path):
            mistakes = [
                *_check_node(path, node, is_called_elsewhere=_lies_in_own(path, nodes) and bool(node.get(PARTIAL)))
            ]
            yield from mistakes
            if not any(mistake.setting.startswith(f"{path}._target_=") for mistake in mistakes):
                yield from _check_partial(path, node, nodes)


def get_provided(path: str) -> set[str]:
    """Return the arguments that build.py passes to the node at this place."""
    if path in PROVIDED:
        return PROVIDED[path]
    group, _, member = path.partition(".")
    return {"run_folder"} if group == "logger" and "." not in member else set()


def _get_provided_to(path: str, signature: Signature) -> set[str]:
    """Return the arguments that build.py passes to the node at this place, given what it is."""
    return set() if is_any_logger(path, signature) or signature.constants.get("is_schedule") else get_provided(path)


def is_any_logger(path: str, signature: Signature) -> bool:
    """Return whether a node is a logger of another package, which knows no run folder."""
    group, _, member = path.partition(".")
    return group == "logger" and "." not in member and "run_folder" not in signature.parameters


def is_repeated(path: str) -> bool:
    """Return whether a node is, or lies in, a section that refers to another one."""
    return any(path == section or path.startswith(f"{section}.") for section in _REPEATED)


def _lies_in_own(path: str, nodes: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a node lies in that of a class of another package, which may call what it is given, or keep it."""
    within = (node for other, node in nodes.items() if path.startswith(f"{other}."))
    return any(node[TARGET].partition(".")[0] not in ("recipes", "callbacks") for node in within)


def _check_node(path: str, node: Mapping[str, Any], *, is_called_elsewhere: bool) -> Iterator[ConfigError]:
    """Check the arguments of a node; one that a class of another package calls later may lack some."""
    target: str = node["_target_"]
    try:
        signature = read_signature(target)
    except TargetNotFoundError as error:
        root = target.partition(".")[0]
        place = locate_code([root])
        own = f"PYTHONPATH={place} before the command if it is code of your own, or {_install(root)}"
        if place == ".":
            own = f"PYTHONPATH=. before the command, for the {root} in this folder"
        is_foreign = "no package" in str(error) and not get_close_matches(root, _PACKAGES, 1)
        fix = own if is_foreign else _suggest_target(path, target)
        if error.meant is not None:
            fix = f"{path}._target_={error.meant}.{_get_name(target)}"
        yield ConfigError(f"{path}._target_={target}", str(error), fix)
        return
    provided = _get_provided_to(path, signature)
    untaken = sorted(provided - signature.parameters.keys())
    if untaken and not signature.takes_any and path.partition(".")[0] in _OF_ANY_PACKAGE:
        yield _cannot_be_called(path, target, untaken[0], signature)
        return
    for key, value in node.items():
        if key in (TARGET, PARTIAL) or (path == "optimizer" and key in RULES):
            continue
        if key in _HYDRA_ONLY:
            where = f"{path}.{key}"
            yield ConfigError(
                f"{where}={to_setting(value)}",
                "it has no effect: a section is built with its settings as they stand, each by its name",
                f"the same command without {where}",
            )
            continue
        if key in provided:
            where = f"{path}.{key}"
            yield ConfigError(
                f"{where}={to_setting(value)}", "build.py provides it", f"the same command without {where}"
            )
            continue
        if key in signature.parameters:
            yield from _check_value(f"{path}.{key}", value, signature, key)
        elif not signature.takes_any:
            where = f"{path}.{key}"
            shown = f"{where}={to_setting(value)}"
            offload = misplaced_offload(node, key, value, shown) if path == "strategy" else None
            yield offload or _unknown(where, value, signature, target)
    for key, parameter in signature.parameters.items():
        if parameter.required and key not in node and key not in provided and not is_called_elsewhere:
            yield ConfigError(f"no {path}.{key}", f"{_get_name(target)} needs it", f"+{path}.{key}=<value>")


def _cannot_be_called(path: str, target: str, argument: str, signature: Signature) -> ConfigError:
    """Return the error in a class or function that does not take what build.py passes to it."""
    group = path.partition(".")[0]
    if group == "scheduler" and "optimizer" in signature.parameters:
        fix = "scheduler=plateau scheduler.patience=10"
        if not target.endswith(".ReduceLROnPlateau"):
            fix = f"scheduler=torch {for_shell(f'scheduler.torch={{_target_: {target}, <argument>: <value>}}')}"
        return ConfigError(f"{path}._target_={target}", "a scheduler of an optimizer has an option around it", fix)
    given = _OF_ANY_PACKAGE.get(path, "further arguments")
    reason = f"a run calls it with {given}, and {_get_name(target)} takes no {argument!r}"
    fix = f"{group}=<an option of conf/{group}/>, or a function of yours that takes {argument!r}, as theirs do"
    if path in _EXAMPLES:
        fix = for_shell(f"{path}={_EXAMPLES[path]}")
    return ConfigError(f"{path}._target_={target}", reason, fix)


def _check_partial(path: str, node: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[ConfigError]:
    """Check that exactly the nodes which somebody calls with further arguments are partial."""
    where, is_partial = f"{path}.{PARTIAL}", node.get(PARTIAL, False)
    provided, (parent, _, key) = _get_provided_to(path, find_signature(node[TARGET])), path.rpartition(".")
    around = find_signature(nodes[parent][TARGET]) if parent in nodes else Signature(parameters={})
    slot, is_deferred = around.parameters.get(key), key in _list_deferred(around)
    declared = "Any" if slot is None or slot.annotation is None else ast.unparse(slot.annotation)
    # takes a function, or whatever it is; what another package declares for one is often the type of its result
    is_free = _lies_in_own(path, nodes) or (parent in nodes and ("Callable" in declared or "Any" in declared))
    if not isinstance(is_partial, bool):
        yield ConfigError(
            f"{where}={to_setting(is_partial)}", "it takes true or false", f"the same command without {where}"
        )
    elif provided and not is_partial and not is_deferred:
        reason = f"build.py calls it with {' and '.join(sorted(provided)[:2])}"
        shown, plus = (f"{where}=false", "") if PARTIAL in node else (f"no {where}", "+")
        yield ConfigError(shown, reason, f"{plus}{where}=true")
    elif is_partial and not provided and not is_free:
        yield ConfigError(f"{where}=true", "it is built at once: nobody calls it again", f"{where}=false")


def _list_deferred(signature: Signature) -> Any:
    """Return the arguments of a class that it builds itself, with or without `_partial_`."""
    return signature.constants.get("deferred", ())


def _install(package: str) -> str:
    """Return the command that installs a package, whose distribution often has its name with dashes."""
    return f"pip install {package.replace('_', '-')} if it is published"


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
    example = _EXAMPLES.get(key if where.partition(".")[0] in ("data", "eval_data") else where)
    if value == "???":
        fix = f"{where}={example or f'<{blank}>'}"
        or_else = ", or data.module=null for the loaders of task.module" if where == "data.module" else ""
        yield ConfigError(f"no {where}", NO_DEFAULT, (for_shell(fix) if "{" in fix else fix) + or_else)
    elif annotation is not None and not _is_node(value) and not matches_type(value, annotation):
        if key == "tokenizer" and where.startswith(("data.", "eval_data.")) and isinstance(value, str):
            yield explain_tokenizer(where, value)
            return
        fix = f"{where}={example}" if example and value is None else suggest(where, value, annotation)
        if example and example.startswith("{"):
            fix = for_shell(f"{where}={example}")
        if example and example.startswith("{") and isinstance(value, str) and _DOTTED.fullmatch(value):
            fix = for_shell(f"{where}={{_target_: {value}}}")
        if isinstance(value, str) and value.startswith("{") and not value.isascii():
            yield ConfigError(f"{where}={value}", NAME_RULE, for_shell(f"{where}={to_ascii(value)}"))
            return
        yield ConfigError(f"{where}={to_setting(value)}", f"it takes {describe(annotation)}", fix)


def explain_tokenizer(where: str, value: str) -> ConfigError:
    """Return the error for the name of a tokenizer at a data source: it is an option, of a group of its own."""
    options = sorted(path.stem for path in (CONF / "tokenizer").glob("*.yaml"))
    fix = f"tokenizer={value}" if value in options else f"tokenizer=<{' | '.join(options)}>"
    return ConfigError(f"{where}={value}", "all data has one tokenizer, which is an option of its own group", fix)


def _unknown(where: str, value: object, signature: Signature, target: str) -> ConfigError:
    parent, _, key = where.rpartition(".")
    shown = "…" if isinstance(value, dict | list) else to_setting(value)
    fitting = [name for name, parameter in signature.parameters.items() if _fits(value, parameter)]
    near = get_close_matches(key, fitting, 1)
    fix = f"{parent}.{near[0]}={shown}" if near else f"'~{where}' to remove it"
    return ConfigError(f"{where}={shown}", f"{_get_name(target)} has no argument {key!r}", fix)


def _fits(value: object, parameter: Parameter) -> bool:
    return parameter.annotation is None or _is_node(value) or matches_type(value, parameter.annotation)


def _is_node(value: object) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _get_name(target: str) -> str:
    return target.rpartition(".")[2]
