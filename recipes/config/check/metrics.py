"""Check the names of metrics that decide something during a run: a wrong one would show at the first validation."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from recipes.config.signature import TargetNotFoundError, read_signature
from recipes.errors import ConfigError

_VALIDATION = "val/"


def check_metrics(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check `checkpoint.best_metric` and what `callbacks.early_stop` monitors against what the task measures."""
    try:
        constants = read_signature(config["task"]["_target_"]).constants
    except TargetNotFoundError:  # an error of its own, found by the check of nodes
        return
    known = constants["val_metric_names"] if "val_metric_names" in constants else None
    if not isinstance(known, tuple) or not known:
        return  # a task that does not declare them
    if config["checkpoint"].get("keep_best"):
        yield from _check("checkpoint.best_metric", config["checkpoint"].get("best_metric"), known)
    for name, node in (config["callbacks"] or {}).items():
        if isinstance(node, Mapping) and node.get("patience") is not None:
            yield from _check(f"callbacks.{name}.monitor", node.get("monitor"), known)


def _check(key: str, metric: object, known: tuple[str, ...]) -> Iterator[ConfigError]:
    """Reject a metric of validation that the task does not have; those of callbacks have prefixes of their own."""
    if not isinstance(metric, str) or metric in known or ("/" in metric and not metric.startswith(_VALIDATION)):
        return
    nearest = get_close_matches(metric, known, 1) or known[:1]
    yield ConfigError(f"{key}={metric}", f"validation measures {' '.join(known)}", f"{key}={nearest[0]}")
