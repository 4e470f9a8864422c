"""Rows of the tables of a run's page: plan, generated text, operators, spikes, events. No Lightning."""

import shlex
import statistics
from typing import Any

from .html import flatten, measure_text, value_text
from .run_record import RunRecord, is_finite

MAX_EVENT_ROWS = 200
MAX_OPERATORS = 20
# event fields omitted from the details in its row
_COMMON_FIELDS = ("time", "step", "event", "mark", "kept_on_resume")

_PLAN_TITLES = {
    "steps": "optimizer steps",
    "samples": "samples",
    "tokens": "tokens",
    "global_batch_size": "global batch size",
    "step_seconds": "seconds per step",
    "seconds": "time",
    "tokens_per_second": "tokens per second",
    "peak_memory_gib": "peak memory, GiB",
    "num_parameters": "parameters",
    "mfu": "MFU",
}


def get_plan(run: RunRecord) -> list[tuple[str, str, str, str]]:
    """Compare planned values from config and `plan.json` with measured ones: title, both, and their ratio."""
    planned, measured = planned_values(run), measured_values(run)
    return [
        (
            _PLAN_TITLES.get(name, name),
            _plan_cell(name, value),
            _plan_cell(name, measured[name]),
            f"{measured[name] / value:.1%}" if value else "",
        )
        for name, value in planned.items()
        if name in measured
    ]


def planned_values(run: RunRecord) -> dict[str, float]:
    """Return counts derived from the config, and values of `plan.json`, under their summary names."""
    config = run.config
    trainer = config["trainer"] if isinstance(config.get("trainer"), dict) else {}
    settings = {
        "steps": trainer.get("max_steps"),
        "global_batch_size": config.get("global_batch_size"),
        "seq_len": config.get("seq_len"),
    }
    known: dict[str, float] = {name: value for name, value in settings.items() if is_finite(value) and value > 0}
    planned: dict[str, float] = {}
    if "steps" in known:
        planned["steps"] = known["steps"]
        if "global_batch_size" in known:
            planned["samples"] = known["steps"] * known["global_batch_size"]
            if "seq_len" in known and not _has_padding(config.get("data")):
                planned["tokens"] = planned["samples"] * known["seq_len"]
    if "global_batch_size" in known:
        planned["global_batch_size"] = known["global_batch_size"]
    return {name: value for name, value in {**planned, **run.plan}.items() if is_finite(value)}


def _has_padding(data: Any) -> bool:
    """Return whether rows of the data, or of a source of it, are packed or padded: not all of a row are tokens."""
    return isinstance(data, dict) and ("packing" in data or any(map(_has_padding, data.values())))


def measured_values(run: RunRecord) -> dict[str, float]:
    """Return the numbers in the summary, plus global batch size and median step time from the rows."""
    measured = {name: value for name, value in run.summary.items() if is_finite(value)}
    samples = run.series.get("train/samples", [])
    # after a rollback, the sample count includes discarded steps
    if len(samples) > 1 and not run.rolled_back:
        (first_step, first_count), (last_step, last_count) = samples[0], samples[-1]
        if last_step > first_step:
            measured["global_batch_size"] = (last_count - first_count) / (last_step - first_step)
    if "time/step_seconds" in run.series:
        measured["step_seconds"] = statistics.median(v for _, v in run.series["time/step_seconds"])
    return measured


def _plan_cell(name: str, value: float) -> str:
    return f"{value:.4g} s" if name == "step_seconds" else measure_text(value, name)


def get_samples(run: RunRecord) -> list[dict[str, Any]]:
    """Return the texts generated at the last step that has any."""
    return [sample for sample in run.samples if sample.get("step") == run.samples[-1].get("step")]


def get_operators(run: RunRecord) -> list[dict[str, Any]]:
    """Return the operators of a profile with the longest self time."""
    complete = [
        operator
        for operator in run.operators
        if "name" in operator and all(is_finite(operator.get(key)) for key in ("calls", "self_seconds", "share"))
    ]
    return sorted(complete, key=lambda operator: -float(operator["self_seconds"]))[:MAX_OPERATORS]


def get_spikes(run: RunRecord) -> list[tuple[str, str, str, str, str, str]]:
    """Return step, alarm, loss, gradient norm, update and folder of each spike dump."""
    return [
        (
            value_text(spike.get("step")),
            _alarm_text(spike),
            _finite_text(spike.get("loss")),
            _finite_text(spike.get("grad_norm")),
            "skipped" if spike.get("skipped") else "applied",
            str(spike["folder"]),
        )
        for spike in run.spikes
    ]


def get_replay(run: RunRecord) -> str:
    """Return the command that replays the newest spike dump; empty for runs of other programs than train.py."""
    if not run.spikes or not run.config.get("mode"):
        return ""
    own_options = [text for text in run.overrides if text.startswith("hydra.searchpath=")]
    newest = run.spikes[-1].get("step")
    command = shlex.join([*own_options, "mode=replay", f"resume={run.folder}", f"mode.step={newest}"])
    return f"python train.py {command}"


def _alarm_text(spike: dict[str, Any]) -> str:
    """Return `loss spike, score 12.5; norm non finite`."""
    alarms = spike["alarms"] if isinstance(spike.get("alarms"), dict) else {}
    texts = []
    for series, alarm in alarms.items():
        kind = alarm.get("kind") if isinstance(alarm, dict) else alarm
        score = alarm.get("score") if isinstance(alarm, dict) else None
        text = f"{series} {value_text(kind)}".replace("_", " ")
        texts.append(f"{text}, score {value_text(score)}" if score else text)
    return "; ".join(texts)


def _finite_text(value: Any) -> str:
    return "not finite" if value is None else value_text(value)


def get_events(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return step, kind and details of the last events."""
    return [
        (value_text(event.get("step")), str(event.get("event")), _event_details(event))
        for event in run.events[-MAX_EVENT_ROWS:]
    ]


def _event_details(event: dict[str, Any]) -> str:
    rest = {k: v for k, v in event.items() if k not in _COMMON_FIELDS}
    return ", ".join(f"{name} {value_text(value)}" for name, value in flatten(rest))
