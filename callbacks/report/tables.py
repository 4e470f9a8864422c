"""What else a run left, as tables: samples, evidence of spikes, operators, events. Escaped HTML, no Lightning."""

import shlex
import statistics
from html import escape
from typing import Any, TypeGuard

from ..progress.text import clock_text
from .html import flat, folded, section, table, words
from .run_record import RunRecord

MAX_EVENT_ROWS = 200
MAX_OPERATORS = 20


def samples(run: RunRecord) -> str:
    """What the model wrote last: every sample of the last step that has any."""
    steps = [sample.get("step") for sample in run.samples]
    last = [sample for sample in run.samples if sample.get("step") == steps[-1]]
    cards = "".join(
        f'<div class="card sample"><p>step {escape(words(sample.get("step")))}, prompt'
        f" <code>{escape(repr(sample.get('prompt')))}</code></p>"
        f"<pre><b>{escape(str(sample.get('prompt')))}</b>{escape(str(sample.get('text')))}</pre></div>"
        for sample in last
    )
    return f'<section id="text"><h2>What it writes</h2>{cards}</section>' if cards else ""


def evidence(run: RunRecord) -> str:
    """A row for each step out of line whose batch and weights were kept, and how to compute it once more."""
    rows = [
        [
            escape(words(one.get("step"))),
            escape(_alarms(one)),
            _number(one.get("loss")),
            _number(one.get("grad_norm")),
            "skipped" if one.get("skipped") else "taken",
            f'<a href="{escape(one["folder"])}">{escape(one["folder"])}</a>',
        ]
        for one in run.evidence
    ]
    if not rows:
        return ""
    heads = ("step", "why", "loss", "gradient norm", "the step was", "evidence")
    newest = run.evidence[-1].get("step")
    command = (
        f"python train.py mode=replay resume={shlex.quote(str(run.folder))} mode.step={newest}"
    )
    again = f'<p class="again">Compute one again: <code>{escape(command)}</code></p>'
    return section("Steps out of line", table(heads, rows) + again, id_="evidence")


def _alarms(one: dict[str, Any]) -> str:
    alarms = one["alarms"] if isinstance(one.get("alarms"), dict) else {}
    told = []
    for series, alarm in alarms.items():
        kind = alarm.get("kind") if isinstance(alarm, dict) else alarm
        score = alarm.get("score") if isinstance(alarm, dict) else None
        told.append(
            f"{series} {words(kind)}".replace("_", " ")
            + (f", score {words(score)}" if score else "")
        )
    return "; ".join(told)


def _number(value: Any) -> str:
    return "not finite" if value is None else escape(words(value))


def operators(run: RunRecord) -> str:
    """The operators of a profile that took the most time themselves."""
    names = ("name", "calls", "self_seconds", "share")
    whole = [one for one in run.operators if all(name in one for name in names)]
    top = sorted(whole, key=lambda one: -float(one["self_seconds"]))[:MAX_OPERATORS]
    rows = [
        [
            f"<code>{escape(str(one['name']))}</code>",
            escape(words(one["calls"])),
            f"{float(one['self_seconds']):.4g}",
            f'<span class="share" style="--share:{float(one["share"]):.4f}">{float(one["share"]):.1%}</span>',
        ]
        for one in top
    ]
    heads = ("operator", "calls", "seconds, itself", "share")
    return section("Where the time went", table(heads, rows), id_="operators") if rows else ""


def events(run: RunRecord) -> str:
    """The last of them, folded."""
    if not run.events:
        return ""
    shown = run.events[-MAX_EVENT_ROWS:]
    rows = [
        [
            escape(words(event.get("step"))),
            escape(str(event.get("event"))),
            escape(_rest_of(event)),
        ]
        for event in shown
    ]
    number = len(run.events)
    count = f"{number:,}" if len(shown) == number else f"last {len(shown)} of {number:,}"
    content = table(("step", "event", ""), rows).replace('class="figures"', 'class="list"')
    return folded(f"Events ({count})", content, id_="events")


def _rest_of(event: dict[str, Any]) -> str:
    rest = {
        k: v
        for k, v in event.items()
        if k not in ("time", "step", "event", "mark", "kept_on_resume")
    }
    return ", ".join(f"{name} {words(value)}" for name, value in flat(rest))


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
