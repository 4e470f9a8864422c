"""The plan of a run against what was measured: a small table, a row where both sides exist. No Lightning."""

import statistics
from html import escape
from typing import Any, TypeGuard

from callbacks.progress_text import clock_text
from callbacks.report_words import section, table, words
from callbacks.run_record import RunRecord

_TITLES = {
    "steps": "optimizer steps",
    "samples": "samples",
    "tokens": "tokens",
    "global_batch_size": "samples per step",
    "step_seconds": "seconds per step",
    "seconds": "time",
    "tokens_per_second": "tokens per second",
    "peak_memory_gib": "peak memory, GiB",
    "num_parameters": "parameters",
    "mfu": "MFU",
}


def plan_table(run: RunRecord) -> str:
    """What the config and `plan.json` say, beside what `metrics.csv` and `summary.json` do."""
    planned, measured = planned_values(run), measured_values(run)
    rows = [
        [
            _title(name),
            _shown(name, value),
            _shown(name, measured[name]),
            _share(value, measured[name]),
        ]
        for name, value in planned.items()
        if name in measured
    ]
    heads = ("", "planned", "measured", "of the plan")
    return section("The plan and what was measured", table(heads, rows)) if rows else ""


def planned_values(run: RunRecord) -> dict[str, float]:
    """Counts from the config's words; times and sizes from the plan, under the summary's names."""
    config = run.config
    trainer = config["trainer"] if isinstance(config.get("trainer"), dict) else {}
    counts = {
        "steps": trainer.get("max_steps"),
        "global_batch_size": config.get("global_batch_size"),
        "seq_len": config.get("seq_len"),
    }
    known: dict[str, float] = {
        name: value for name, value in counts.items() if _is_number(value) and value > 0
    }
    planned: dict[str, float] = {}
    if "steps" in known:
        planned["steps"] = known["steps"]
        if "global_batch_size" in known:
            planned["samples"] = known["steps"] * known["global_batch_size"]
            if "seq_len" in known:
                planned["tokens"] = planned["samples"] * known["seq_len"]
    if "global_batch_size" in known:
        planned["global_batch_size"] = known["global_batch_size"]
    return planned | {name: value for name, value in run.plan.items() if _is_number(value)}


def measured_values(run: RunRecord) -> dict[str, float]:
    """Numbers of the summary, and of the rows the median step."""
    measured = {name: value for name, value in run.summary.items() if _is_number(value)}
    samples = run.series["train/samples"] if "train/samples" in run.series else []
    if len(samples) > 1 and not run.undone:
        (first, of_first), (last, of_last) = samples[0], samples[-1]
        if last > first:
            measured["global_batch_size"] = (of_last - of_first) / (last - first)
    if "time/step_seconds" in run.series:
        measured["step_seconds"] = statistics.median(v for _, v in run.series["time/step_seconds"])
    return measured


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _title(name: str) -> str:
    return escape(_TITLES[name] if name in _TITLES else name)


def _shown(name: str, value: float) -> str:
    if name == "seconds":
        return clock_text(value)
    if name == "step_seconds":
        return f"{value:.4g} s"
    if name == "mfu":
        return f"{value:.1%}"
    return f"{value:.3g}" if name == "peak_memory_gib" else escape(words(value))


def _share(planned: float, measured: float) -> str:
    return f"{measured / planned:.1%}" if planned else ""
