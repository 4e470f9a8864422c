"""Tables of a run's page: plan, generated text, operators, spikes, events. Escaped HTML, no Lightning."""

import shlex
import statistics
from html import escape
from typing import Any, TypeGuard

from .html import flatten, folded, measure_text, quoted_link, section, table, value_text
from .run_record import RunRecord

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


def plan_table(run: RunRecord) -> str:
    """Return a table that compares planned values from config and `plan.json` with measured ones."""
    planned, measured = planned_values(run), measured_values(run)
    rows = [
        [
            escape(_PLAN_TITLES.get(name, name)),
            _plan_cell(name, value),
            _plan_cell(name, measured[name]),
            f"{measured[name] / value:.1%}" if value else "",
        ]
        for name, value in planned.items()
        if name in measured
    ]
    heads = ("", "planned", "measured", "measured / planned")
    return section("Planned and measured", table(heads, rows)) if rows else ""


def planned_values(run: RunRecord) -> dict[str, float]:
    """Return counts derived from the config, and values of `plan.json`, under their summary names."""
    config = run.config
    trainer = config["trainer"] if isinstance(config.get("trainer"), dict) else {}
    settings = {
        "steps": trainer.get("max_steps"),
        "global_batch_size": config.get("global_batch_size"),
        "seq_len": config.get("seq_len"),
    }
    known: dict[str, float] = {name: value for name, value in settings.items() if _is_number(value) and value > 0}
    planned: dict[str, float] = {}
    if "steps" in known:
        planned["steps"] = known["steps"]
        if "global_batch_size" in known:
            planned["samples"] = known["steps"] * known["global_batch_size"]
            if "seq_len" in known and not _has_padding(config.get("data")):
                planned["tokens"] = planned["samples"] * known["seq_len"]
    if "global_batch_size" in known:
        planned["global_batch_size"] = known["global_batch_size"]
    return planned | {name: value for name, value in run.plan.items() if _is_number(value)}


def _has_padding(data: Any) -> bool:
    """Return whether rows of the data, or of a source of it, are packed or padded: not all of a row are tokens."""
    return isinstance(data, dict) and ("packing" in data or any(map(_has_padding, data.values())))


def measured_values(run: RunRecord) -> dict[str, float]:
    """Return the numbers in the summary, plus global batch size and median step time from the rows."""
    measured = {name: value for name, value in run.summary.items() if _is_number(value)}
    samples = run.series.get("train/samples", [])
    # after a rollback, the sample count includes discarded steps
    if len(samples) > 1 and not run.rolled_back:
        (first_step, first_count), (last_step, last_count) = samples[0], samples[-1]
        if last_step > first_step:
            measured["global_batch_size"] = (last_count - first_count) / (last_step - first_step)
    if "time/step_seconds" in run.series:
        measured["step_seconds"] = statistics.median(v for _, v in run.series["time/step_seconds"])
    return measured


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plan_cell(name: str, value: float) -> str:
    return f"{value:.4g} s" if name == "step_seconds" else escape(measure_text(value, name))


def sample_texts(run: RunRecord) -> str:
    """Return the texts generated at the last step that has any."""
    steps = [sample.get("step") for sample in run.samples]
    last = [sample for sample in run.samples if sample.get("step") == steps[-1]]
    cards = "".join(
        f'<div class="card sample"><p>step {escape(value_text(sample.get("step")))}, prompt'
        f" <code>{escape(repr(sample.get('prompt')))}</code></p>"
        f"<pre><b>{escape(str(sample.get('prompt')))}</b>{escape(str(sample.get('text')))}</pre></div>"
        for sample in last
    )
    return f'<section id="text"><h2>Generated text</h2>{cards}</section>' if cards else ""


def operators_table(run: RunRecord) -> str:
    """Return the operators of a profile with the longest self time."""
    keys = ("name", "calls", "self_seconds", "share")
    complete = [operator for operator in run.operators if all(key in operator for key in keys)]
    top = sorted(complete, key=lambda o: -float(o["self_seconds"]))[:MAX_OPERATORS]
    rows = []
    for operator in top:
        fraction = float(operator["share"])
        rows.append(
            [
                f"<code>{escape(str(operator['name']))}</code>",
                escape(value_text(operator["calls"])),
                f"{float(operator['self_seconds']):.4g}",
                f'<span class="fraction" style="--fraction:{fraction:.4f}">{fraction:.1%}</span>',
            ]
        )
    heads = ("operator", "calls", "self time, s", "of the total")
    return section("Profile by operator", table(heads, rows), id_="operators") if rows else ""


def spikes_table(run: RunRecord) -> str:
    """Return one row per spike dump and, for runs of train.py, the command that replays the newest."""
    rows = [
        [
            escape(value_text(spike.get("step"))),
            escape(_alarm_text(spike)),
            _finite_text(spike.get("loss")),
            _finite_text(spike.get("grad_norm")),
            "skipped" if spike.get("skipped") else "applied",
            f'<a href="{quoted_link(str(spike["folder"]))}">{escape(spike["folder"])}</a>',
        ]
        for spike in run.spikes
    ]
    if not rows:
        return ""
    heads = ("step", "alarm", "loss", "gradient norm", "update", "dump")
    replay = ""
    if run.config.get("mode"):  # only for runs of train.py
        newest = run.spikes[-1].get("step")
        own_options = [text for text in run.overrides if text.startswith("hydra.searchpath=")]
        command = shlex.join([*own_options, "mode=replay", f"resume={run.folder}", f"mode.step={newest}"])
        command = f"python train.py {command}"
        replay = f'<p class="replay">Recompute a step: <code>{escape(command)}</code></p>'
    return section("Spike dumps", table(heads, rows) + replay, id_="spikes")


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
    return "not finite" if value is None else escape(value_text(value))


def events_table(run: RunRecord) -> str:
    """Return the last events in a collapsed card."""
    if not run.events:
        return ""
    shown = run.events[-MAX_EVENT_ROWS:]
    rows = [
        [
            escape(value_text(event.get("step"))),
            escape(str(event.get("event"))),
            escape(_event_details(event)),
        ]
        for event in shown
    ]
    total = len(run.events)
    count = f"{total:,}" if len(shown) == total else f"last {len(shown)} of {total:,}"
    content = table(("step", "event", "details"), rows, css="list")
    return folded(f"Events ({count})", content, id_="events")


def _event_details(event: dict[str, Any]) -> str:
    rest = {k: v for k, v in event.items() if k not in _COMMON_FIELDS}
    return ", ".join(f"{name} {value_text(value)}" for name, value in flatten(rest))
