"""What else a run left, as tables: samples, evidence of spikes, operators, events. Escaped HTML, no Lightning."""

import shlex
from html import escape
from typing import Any

from callbacks.report_words import flat, folded, section, table, words
from callbacks.run_record import RunRecord

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
    rest = {k: v for k, v in event.items() if k not in ("time", "step", "event")}
    return ", ".join(f"{name} {words(value)}" for name, value in flat(rest))
