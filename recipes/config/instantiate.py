"""Call the constructors in a checked config. Values are already resolved: any `${…}` in them is text."""

import functools
import sys
from collections.abc import Mapping
from typing import Any

from recipes.config.signature import find_signature
from recipes.errors import ConfigError
from recipes.runtime.own_code import name_own_code

TARGET, PARTIAL = "_target_", "_partial_"
PLUGINS = "hydra_plugins."  # a package that exists only while Hydra runs
# settings in the section of the optimizer that are no arguments of it -> their value without rules
RULES: dict[str, Any] = {"groups": [], "layer_decay": None}
_APPLY_RULES, _MAKE_OPTIMIZER = (f"recipes.optimizer.rules.{name}" for name in ("apply_rules", "make_optimizer"))
OPTUNA = "recipes.sweep.optuna_sweeper.OptunaSweeper"  # the one that it has, under its own name


def make(node: Mapping[str, Any], *, data_section: str | None = None) -> Any:
    """Call a node's `_target_` with its other values, building nested nodes first.

    Hydra's `instantiate` would resolve interpolations again. In a resolved value `${…}` is text that the user escaped,
    or that somebody else's config contains to read an environment variable.

    Args:
        node: Plain values; with `_partial_: true` the constructor is returned with its arguments bound.
        data_section: Section of a data source, such as "eval_data.code", which its errors and those of the sources in
            it name; None: not a data source.

    Raises:
        hydra.errors.InstantiationException: There is no such constructor, Hydra blocks it, or it rejects a value.
        ConfigError: A file of its class cannot be imported.
        Exception: Code of somebody's own fails in it.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        constructor = instantiate(
            {TARGET: _as_imported(node[TARGET]), PARTIAL: True}
        )  # rejects those that run commands
    except InstantiationException as error:
        if (mistake := _explain_import(node[TARGET], error)) is None:
            raise
        raise mistake from error
    deferred = getattr(constructor.func, "deferred", ())
    arguments = {
        key: (_defer if key in deferred and value is not None else _make_within)(
            value, data_section and f"{data_section}.{key}"
        )
        for key, value in node.items()
        if key not in (TARGET, PARTIAL)
    }
    bound = functools.partial(constructor, **arguments)
    if node.get(PARTIAL):
        return bound
    try:
        return bound()
    except ConfigError as error:
        if data_section is None:
            raise
        raise error.in_section(data_section) from error
    except (TypeError, ValueError) as error:
        if name_own_code(error) is not None:
            raise  # the arguments are those of its signature, which was checked: no other value need help
        raise InstantiationException(f"Error in call to target '{node[TARGET]}': {error!r}") from error


def _as_imported(target: str) -> str:
    """Return the path of a constructor under the name that `lightning_recipes` imports its module by.

    From Python, a project may have a package `callbacks` of its own beside ours.
    """
    callbacks = sys.modules.get("lightning_recipes.callbacks")
    if callbacks is None or not target.startswith("callbacks."):
        return target
    return callbacks.__name__ + target.removeprefix("callbacks")


def _defer(node: Mapping[str, Any] | None, data_section: str | None) -> Any:
    """Return a function that builds a node, of an argument that a class lists as `deferred` because it may be slow."""
    if node is None:
        return None
    own = {key: value for key, value in node.items() if key != PARTIAL}
    return lambda **further: make({**own, **further})


def _explain_import(target: str, error: BaseException) -> ConfigError | None:
    """Return the error of a class whose file cannot be imported; None if it is another one."""
    if not isinstance(error.__cause__, ImportError) or error.__cause__.__cause__ is None:
        return None
    cause = error.__cause__.__cause__
    module = target.rpartition(".")[0]
    package = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
    fix = f"python -c 'import {module}', and mend it"
    if package and package != module.partition(".")[0]:  # not a name of its own
        install = f"pip install {package.replace('_', '-')}"
        fix = f"{install}, or PYTHONPATH=<the folder with {package}> before the command if it is code of your own"
    return ConfigError(f"{TARGET}={target}", f"importing it raises {type(cause).__name__}: {cause}", fix)


def _make_within(value: Any, data_section: str | None) -> Any:
    if isinstance(value, Mapping):
        if TARGET in value:
            return make(value, data_section=data_section)
        return {key: _make_within(child, data_section and f"{data_section}.{key}") for key, child in value.items()}
    return [_make_within(child, data_section) for child in value] if isinstance(value, list) else value


def make_model(config: Mapping[str, Any]) -> Any:
    """Return the model of a config, with its adapter and what its task attaches, frozen where its rules say so."""
    model = make(config["model"])
    make(config["adapter"]).apply(model)
    attaches = find_signature(str(config["task"][TARGET])).constants.get("attaches")
    if attaches is not None:  # after the adapter, which freezes all that is there
        settings = {
            name: config["task"][name] for name in find_signature(attaches).parameters if name in config["task"]
        }
        make({TARGET: attaches, PARTIAL: True} | settings)(model)
    rules = {key: config["optimizer"].get(key, default) for key, default in RULES.items()}
    # none in the config of an older run
    make({TARGET: _APPLY_RULES, PARTIAL: True, "freeze": config.get("freeze", [])} | rules)(model)
    return model


def make_optimizer(config: Mapping[str, Any]) -> Any:
    """Return the function that makes the optimizer of a model, with the groups that the rules divide it into."""
    construct = {key: value for key, value in config["optimizer"].items() if key not in RULES}
    return make({TARGET: _MAKE_OPTIMIZER, PARTIAL: True, "construct": construct})
