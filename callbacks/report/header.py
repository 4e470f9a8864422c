"""The header of a run's page: name, status, hardware, findings, diagnosis and key figures. No Lightning."""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

from ..diagnosis.diagnose import examine
from ..diagnosis.finding import Finding
from ..diagnosis.run import make_run
from ..progress.text import TRAIN_LOSS, VAL_LOSS, clock_text
from .config import command_line_overrides
from .html import section, value_text
from .run_record import RunRecord, get_status

_STATUS_CLASSES = {"finished": "good"} | dict.fromkeys(
    ("preempted", "stopped", "interrupted", "running", "unknown"), "warn"
)
_SEVERITY_CLASSES = {"critical": "bad", "warning": "warn", "note": "warn"}


def head(run: RunRecord) -> str:
    """Return name, status, start time, devices and host, and the command if no overrides are recorded."""
    keys = ("devices", "hostname") if run.overrides else ("devices", "hostname", "command")
    environment = [value_text(run.environment[key]) for key in keys if run.environment.get(key)]
    items = [*_start_time(run), *environment]
    line = " · ".join(f"<code>{escape(item)}</code>" for item in items)
    return (
        f'<header><div class="head"><h1>{escape(run.name)}</h1>{status_pill(run)}</div>'
        f'<p class="where">{line}</p></header>'
    )


def mode_head(title: str, about: Mapping[str, Any], *, pills: Mapping[str, str] | None = None) -> str:
    """Return the header of a page of a mode, which distinguishes it from others.

    Args:
        title: What the page is, as plain text.
        about: `name`, `time` in Unix seconds, `devices`, `hostname` and `overrides` of the command; any may be missing.
        pills: Style class by text of each status.
    """
    facts = [_clock_time(about["time"])] if "time" in about else []
    facts += [value_text(about[key]) for key in ("devices", "hostname") if about.get(key)]
    line = " · ".join(f"<code>{escape(fact)}</code>" for fact in facts)
    drawn = "".join(pill(text, css) for text, css in (pills or {}).items())
    return (
        f'<header><div class="head"><h1>{escape(page_title(title, about))}</h1>{drawn}</div>'
        f'<p class="where">{line}</p></header>{command_line_overrides(about.get("overrides", ()))}'
    )


def page_title(title: str, about: Mapping[str, Any]) -> str:
    """Return the title of a page of a mode, with the name of what it is about."""
    return f"{title}: {about['name']}" if about.get("name") else title


def pill(text: str, css: str) -> str:
    """Return a colored status; the style class is `good`, `warn` or `bad`."""
    return f'<span class="status {css}">{escape(text)}</span>'


def status_pill(run: RunRecord) -> str:
    """Return the colored status of a run; empty if the run folder does not say how it ended."""
    status = get_status(run)
    return "" if status is None else pill(status, status_class(status))


def status_class(status: str) -> str:
    """Return the style class of a status: `good`, `warn`, or `bad` for any other."""
    return _STATUS_CLASSES.get(status, "bad")


def _start_time(run: RunRecord) -> list[str]:
    """Return the time of the first event; empty if it has none."""
    seconds = run.events[0].get("time") if run.events else None
    return [_clock_time(seconds)] if isinstance(seconds, (int, float)) and seconds else []


def _clock_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def findings_section(run: RunRecord) -> str:
    """Return a card of findings with their steps, or a line saying there are none; empty without a training loss."""
    found = make_run(run.series, folder=run.folder, config=run.config, status=get_status(run), events=run.events)
    if "loss" not in found.curves:
        return ""
    examined = examine(found)
    if not examined.findings:
        return f'<p class="legend">No finding among {len(examined.examined)} symptoms checked</p>'
    return section("Findings", "".join(map(_describe, examined.findings)), id_="findings")


def _describe(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(str(item))}</li>" for item in finding.evidence)
    causes = "".join(f"<li>{escape(cause.text)}: <code>{escape(cause.test)}</code></li>" for cause in finding.causes)
    title = escape(finding.name.replace("_", " "))
    severity = pill(finding.severity, _SEVERITY_CLASSES[finding.severity])
    return f"<p>{severity} <b>{title}</b>: {escape(finding.meaning)}</p><ul>{evidence}</ul><ol>{causes}</ol>"


def diagnosis(run: RunRecord) -> str:
    """Return the findings of BottleneckMonitor, one line each."""
    findings = [e for e in run.events if e.get("event") == "diagnosis" and e.get("text")]
    lines = "".join(
        f"<li><b>step {escape(value_text(event.get('step')))}</b> {escape(str(event['text']))}</li>"
        for event in findings
    )
    return f'<section class="card diagnosis"><h2>Diagnosis</h2><ul>{lines}</ul></section>' if lines else ""


def tiles(run: RunRecord) -> str:
    """Return the key figures, from the summary if it exists, else from the last row."""
    summary = run.summary
    figures = {
        "train loss": _summary_or_row(run, "train_loss", TRAIN_LOSS),
        "val loss": _summary_or_row(run, "val_loss", VAL_LOSS),
        "val accuracy": run.last("val/accuracy"),
        "tokens/s": _summary_or_row(run, "tokens_per_second", ("throughput/tokens_per_second",)),
        "MFU": summary.get("mfu"),
        "steps": summary.get("steps") or run.last_step,
        "tokens": summary.get("tokens"),
        "time": summary.get("seconds"),
        "peak memory": summary.get("peak_memory_gib"),
    }
    notes = {"peak memory": " <small>GiB</small>"}
    best = summary.get("best_val_loss")
    if isinstance(best, (int, float)) and math.isfinite(best):
        notes["val loss"] = f" <small>best {best:.4g}</small>"
    items = "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{_tile_value(name, value)}{notes.get(name, "")}</dd></div>'
        for name, value in figures.items()
        if value is not None
    )
    return f'<dl class="tiles">{items}</dl>'


def _tile_value(name: str, value: Any) -> str:
    number = float(value)
    if not math.isfinite(number):
        return "not finite"
    if name == "time":
        return clock_text(number)
    if name == "MFU":
        return f"{number:.1%}"
    if name == "tokens" and number >= 1e7:
        scale, letter = (1e9, "B") if number >= 1e9 else (1e6, "M")
        return f"{number / scale:.4g} {letter}"
    if name in ("tokens/s", "steps", "tokens"):
        return f"{number:,.0f}"
    return f"{number:.4g}"


def _summary_or_row(run: RunRecord, key: str, metrics: Iterable[str]) -> Any:
    """Return a summary value, else the last value of the first of `metrics` that was logged, else None."""
    value = run.summary.get(key)
    if value is not None:
        return value
    return next((last for name in metrics if (last := run.last(name)) is not None), None)
