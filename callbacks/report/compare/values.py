"""Extract the values by which runs are compared, and the config values that differ. No Lightning."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...progress.text import TRAIN_LOSS, VAL_LOSS
from ..config import shown_config, typed_keys
from ..html import flatten
from ..run_record import RunRecord, is_finite

# keys of summary.json, and the metrics used instead for a run without a summary
METRICS_BY_MEASURE: dict[str, tuple[str, ...]] = {
    "val_loss": VAL_LOSS,
    "best_val_loss": VAL_LOSS,
    "train_loss": TRAIN_LOSS,
    "val_accuracy": ("val/accuracy", "val_acc"),
    "steps": (),
    "tokens": ("train/tokens",),
    "tokens_per_second": ("throughput/tokens_per_second",),
    "mfu": ("throughput/mfu",),
    "peak_memory_gib": ("memory/allocated_peak_gib", "memory/host_peak_gib"),
    "seconds": (),
    "rollbacks": ("spike/rollbacks",),
    "skipped_steps": ("spike/skipped_steps",),
}
_SPLITS = ("train", "val")  # a column `val/loss` would be mistaken for the training run's metric
_HIGHER_IS_BETTER = (
    "accuracy",
    "acc",
    "exact_match",
    "reward",
    "chrf",
    "rouge",
    "mcc",
    "pass@",
    "per_second",
    "mfu",
    "tflops",
    "f1",
    "auc",
    "bleu",
    "fraction",
)
_NEITHER_IS_BETTER = ("steps", "tokens", "samples", "lr")
# config nodes that affect where a run is stored and what observes it, but not what it trains
_NOT_PARAMETERS = ("name", "tags", "resume", "loader", "callbacks", "logger")


# name of a metric -> whether a higher value is better
Directions = Mapping[str, bool]


def get_value(run: RunRecord, measure: str) -> float | None:
    """Return a value from the summary, else from the last row; None if unknown.

    Args:
        run: The run.
        measure: A key of `summary.json`, a metric, or a key returned by `get_evaluations`.
    """
    names = METRICS_BY_MEASURE.get(measure, (measure, measure.replace("_", "/", 1)))
    declared = run.summary.get("measures")
    if measure == "train_loss" and isinstance(declared, dict) and "train/loss" in declared:
        return None  # it says nothing of what is learned
    if measure in run.summary and is_finite(run.summary[measure]):
        return float(run.summary[measure])
    if measure in (evaluated := get_evaluations(run)):
        return evaluated[measure]
    if measure == "steps":
        return run.last_step
    points = next((run.series[name] for name in names if name in run.series), [])
    if measure.startswith("best_"):
        return find_best([value for _, value in points], measure, get_directions([run]))
    return points[-1][1] if points and math.isfinite(points[-1][1]) else None


def get_evaluations(run: RunRecord) -> dict[str, float]:
    """Return evaluation results after training by `<task>/<metric>`, or `evaluate_<split>/<metric>` for a split."""
    evaluations = run.summary.get("evaluations")
    found: dict[str, float] = {}
    for name, metrics in evaluations.items() if isinstance(evaluations, dict) else ():
        owner = f"evaluate_{name}" if name in _SPLITS else name
        values = metrics.items() if isinstance(metrics, dict) else ()
        found |= {f"{owner}/{metric}": float(value) for metric, value in values if is_finite(value)}
    return found


def get_directions(runs: Sequence[RunRecord]) -> Directions:
    """Return what the runs declare in summary.json: name of a metric -> whether a higher value is better."""
    found: dict[str, bool] = {}
    for run in runs:
        measures = run.summary.get("measures")
        if isinstance(measures, dict):
            found |= {name: is_high for name, is_high in measures.items() if isinstance(is_high, bool)}
    return found


def find_best(values: Sequence[float], measure: str, declared: Directions = MappingProxyType({})) -> float | None:
    """Return the best finite value: the lowest for a loss, the highest for an accuracy; None if none is finite."""
    finite = [value for value in values if math.isfinite(value)]
    return (max if is_higher_better(measure, declared) else min)(finite) if finite else None


def is_higher_better(measure: str, declared: Directions = MappingProxyType({})) -> bool:
    """Return whether a higher value is better, as declared, else by the name; other names are treated as losses."""
    if measure in declared:
        return declared[measure]
    return any(part in measure for part in _HIGHER_IS_BETTER)


def has_best(measure: str) -> bool:
    """Return whether one value can be better than another."""
    return not any(measure.endswith(name) for name in _NEITHER_IS_BETTER)


def get_parameters(run: RunRecord) -> dict[str, Any]:
    """Return the flattened config, with each node's class under the node's name."""
    parameters = {}
    for name, value in flatten(shown_config(run.config)):
        if name.split(".")[0] in _NOT_PARAMETERS or name.endswith("_partial_"):
            continue
        if name.endswith("._target_"):
            parameters[name.removesuffix("._target_")] = str(value).rpartition(".")[2]
        else:
            parameters[name] = "null" if value is None else value
    return parameters


def differing_parameters(runs: Sequence[RunRecord], first: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the parameters that differ, with their value in each run.

    A value is None if the run has no such parameter or no config. A parameter that was not overridden and has the same
    values as an earlier one is assumed to follow from it and is omitted.

    Args:
        runs: The runs to compare.
        first: Parameters to list first, followed by command-line overrides and then all others.
    """
    configs = [get_parameters(run) for run in runs]
    readable = [config for config in configs if config]
    names = list(dict.fromkeys(name for config in readable for name in config))
    typed = typed_keys([override for run in runs for override in run.overrides])
    ranks = {name: i for i, name in enumerate(first)}
    names.sort(key=lambda name: (ranks.get(name, len(ranks)), name not in typed))
    found: dict[str, list[Any]] = {}
    seen: set[tuple[str, ...]] = set()
    for name in names:
        values = [config.get(name) for config in configs]
        # repr distinguishes 1 from True and from "1"
        written = tuple(map(repr, values))
        differs = len({repr(config[name]) if name in config else "" for config in readable}) > 1
        if differs and (name in typed or written not in seen):
            found[name] = values
            seen.add(written)
    return found


def short_names(names: Sequence[str]) -> Mapping[str, str]:
    """Shorten `optimizer.lr` to `lr` if no other parameter ends in it."""
    tails = [name.rpartition(".")[2] for name in names]
    return {name: tail if tails.count(tail) == 1 else name for name, tail in zip(names, tails, strict=True)}
