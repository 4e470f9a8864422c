"""The numbers that runs are compared by, and what their configs differ in: plain values. No Lightning."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...progress.text import TRAIN_LOSS, VAL_LOSS
from ..config import shown_config, typed_keys
from ..html import flat
from ..run_record import RunRecord

# What stands in a summary, and the metrics that tell it of a run that has none yet.
METRICS_OF: dict[str, tuple[str, ...]] = {
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
_MORE_IS_BETTER = (
    "accuracy",
    "acc",
    "per_second",
    "mfu",
    "tflops",
    "f1",
    "auc",
    "bleu",
    "fraction",
)
_NEITHER = ("steps", "tokens", "samples", "lr")
# Words that say where a run lies, not what it is.
_NO_PARAMETERS = ("name", "tags", "resume", "loader", "callbacks", "logger")


def get_value(run: RunRecord, measure: str) -> float | None:
    """A number of the summary, else of the last row, by the summary's name or the metric's; None if unknown."""
    if measure in run.summary and is_finite(run.summary[measure]):
        return float(run.summary[measure])
    if measure == "steps":
        return run.last_step
    names = (
        METRICS_OF[measure] if measure in METRICS_OF else (measure, measure.replace("_", "/", 1))
    )
    points = next((run.series[name] for name in names if name in run.series), [])
    if measure.startswith("best_"):
        return find_best([value for _, value in points], measure)
    return points[-1][1] if points and math.isfinite(points[-1][1]) else None


def find_best(values: Sequence[float], measure: str) -> float | None:
    """The lowest finite value of a loss, the highest of an accuracy."""
    finite = [value for value in values if math.isfinite(value)]
    return (max if is_better_when_more(measure) else min)(finite) if finite else None


def is_better_when_more(measure: str) -> bool:
    """By the words in its name; a name that says nothing counts as a loss."""
    return any(word in measure for word in _MORE_IS_BETTER)


def has_best(measure: str) -> bool:
    """Whether one value of it is better than another."""
    return not any(measure.endswith(word) for word in _NEITHER)


def is_finite(value: Any) -> bool:
    """Whether it is a number that can be compared."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def get_parameters(run: RunRecord) -> dict[str, Any]:
    """The config on one level; of a node, the class under the node's own name."""
    parameters = {}
    for name, value in flat(shown_config(run.config)):
        if name.split(".")[0] in _NO_PARAMETERS or name.endswith("_partial_"):
            continue
        if name.endswith("._target_"):
            parameters[name.removesuffix("._target_")] = str(value).rpartition(".")[2]
        else:
            parameters[name] = "null" if value is None else value
    return parameters


def differing(runs: Sequence[RunRecord], first: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Parameters that differ, with their values by run; None where a run has no such parameter or no config.

    Those in `first` come first, then what was typed. What has the same values as one before it, and was not typed,
    follows from that one and is left out.
    """
    every = [get_parameters(run) for run in runs]
    read = [one for one in every if one]
    names = list(dict.fromkeys(name for one in read for name in one))
    typed = typed_keys([word for run in runs for word in run.overrides])
    ranks = {name: i for i, name in enumerate(first)}
    names.sort(key=lambda name: (ranks[name] if name in ranks else len(ranks), name not in typed))
    found: dict[str, list[Any]] = {}
    seen: set[tuple[str, ...]] = set()
    for name in names:
        values = [one[name] if name in one else None for one in every]
        written = tuple(map(repr, values))
        differ = len({repr(one[name]) if name in one else "" for one in read}) > 1
        if differ and (name in typed or written not in seen):
            found[name] = values
            seen.add(written)
    return found


def short_names(names: Sequence[str]) -> Mapping[str, str]:
    """`optimizer.lr` -> `lr` where no other parameter ends so."""
    tails = [name.rpartition(".")[2] for name in names]
    return {
        name: tail if tails.count(tail) == 1 else name
        for name, tail in zip(names, tails, strict=True)
    }
