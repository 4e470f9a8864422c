"""A run as one picture and one page that opens offline: a second or two, no Lightning."""

import math
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from callbacks.axis import value_label
from callbacks.curves import Chart, Mark, charts_of, marks_of
from callbacks.curves_png import write_png
from callbacks.curves_svg import chart_html, points_json
from callbacks.progress_text import VAL_LOSS, clock_text
from callbacks.run_record import RunRecord, read_run

TRAIN_LOSS = ("train/loss", "train_loss", "train_loss_step", "loss")
MAX_EVENT_ROWS = 200
_STATUS_CLASSES = {
    "finished": "good",
    "preempted": "warn",
    "stopped": "warn",
    "running": "warn",
}  # any other: bad
_STATUS_OF_EVENT = {"end": "finished", "stop": "stopped", "preempted": "preempted"}


def write_report(run_folder: Path) -> None:
    """Write `curves.png` and `report.html` into a run folder, from the files that are in it.

    Needs `metrics.csv`; takes `summary.json`, `environment.json`, `config.yaml`, `events.jsonl`
    and `samples.jsonl` where they are there. Call it again when there are more of them.
    Raises FileNotFoundError without `metrics.csv`.
    """
    run = read_run(run_folder)
    charts, marks = charts_of(run), marks_of(run.events)
    if charts:
        write_png(run_folder / "curves.png", title=run.name, charts=charts, marks=marks)
    partial = run_folder / ".report.html.partial"
    partial.write_text(page_html(run, charts, marks), encoding="utf-8")
    partial.replace(run_folder / "report.html")


def page_html(run: RunRecord, charts: list[Chart], marks: list[Mark]) -> str:
    """The whole page. Whatever came from a file of the run is escaped."""
    here = Path(__file__).parent
    style = (here / "report_page.css").read_text(encoding="utf-8")
    script = (here / "report_page.js").read_text(encoding="utf-8")
    figures = "".join(chart_html(chart, marks, index=i) for i, chart in enumerate(charts))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>{style}</style></head><body><main>"
        f'{_head(run)}{_tiles(run)}<section class="charts">{figures}</section>{_mark_legend(marks)}'
        f"{_samples(run)}"
        f'<div class="pair">{_table("Summary", run.summary)}'
        f"{_table('Environment', run.environment)}</div>"
        f"{_events(run)}{_config(run)}"
        f"<footer>{escape(str(run.folder))}</footer></main>"
        f'<script type="application/json" id="points">{points_json(charts, marks)}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def how_it_ended(run: RunRecord) -> str | None:
    """The summary's status; before there is one, what the last event says; None if nothing does."""
    if "status" in run.summary:
        return str(run.summary["status"])
    if not run.events:
        return None
    last = str(run.events[-1].get("event"))
    return _STATUS_OF_EVENT.get(last, "running")


def _head(run: RunRecord) -> str:
    status = how_it_ended(run)
    pill = ""
    if status is not None:
        kind = _STATUS_CLASSES.get(status, "bad")
        pill = f'<span class="status {kind}">{escape(status)}</span>'
    present = [key for key in ("devices", "hostname", "command") if run.environment.get(key)]
    words = (_words(run.environment[key]) for key in present)
    where = " · ".join(f"<code>{escape(word)}</code>" for word in words)
    return (
        f'<header><div class="head"><h1>{escape(run.name)}</h1>{pill}</div>'
        f'<p class="where">{where}</p></header>'
    )


def _tiles(run: RunRecord) -> str:
    """The numbers one looks for first. From the summary; before there is one, from the last row."""
    summary = run.summary
    best = _finite(summary.get("best_val_loss"))
    val_name = "val loss" if best is None else f"val loss, best {best:.4g}"
    tiles = [
        ("train loss", _either(run, "train_loss", TRAIN_LOSS), ""),
        (val_name, _either(run, "val_loss", VAL_LOSS), ""),
        ("val accuracy", run.last("val/accuracy"), ""),
        ("tokens/s", _either(run, "tokens_per_second", ("throughput/tokens_per_second",)), ""),
        ("MFU", summary.get("mfu"), ""),
        ("steps", summary.get("steps", run.last_step), ""),
        ("tokens", summary.get("tokens"), ""),
        ("time", summary.get("seconds"), ""),
        ("peak memory", summary.get("peak_memory_gib"), "GiB"),
    ]
    items = "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{_tile_value(name, value)}'
        f"{f' <small>{escape(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in tiles
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
        scale, letter = (1e9, "G") if number >= 1e9 else (1e6, "M")
        return f"{number / scale:.4g} {letter}"
    if name in ("tokens/s", "steps", "tokens"):
        return f"{number:,.0f}"
    return f"{number:.4g}"


def _either(run: RunRecord, key: str, metrics: Iterable[str]) -> Any:
    value = run.summary.get(key)
    if value is not None:
        return value
    return next((last for name in metrics if (last := run.last(name)) is not None), None)


def _finite(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _mark_legend(marks: list[Mark]) -> str:
    if not marks:
        return ""
    kinds = sorted({mark.event for mark in marks})
    counts = ", ".join(f"{sum(m.event == kind for m in marks)} {escape(kind)}" for kind in kinds)
    return f'<p class="legend"><b>┆</b> events: {counts}</p>'


def _samples(run: RunRecord) -> str:
    """What the model wrote last: every sample of the last step that has any."""
    steps = [sample.get("step") for sample in run.samples]
    last = [sample for sample in run.samples if sample.get("step") == steps[-1]]
    cards = "".join(
        f'<div class="card sample"><p>step {escape(str(sample.get("step")))}, prompt'
        f" <code>{escape(repr(sample.get('prompt')))}</code></p>"
        f"<pre><b>{escape(str(sample.get('prompt')))}</b>{escape(str(sample.get('text')))}</pre></div>"
        for sample in last
    )
    return f"<h2>What it writes</h2>{cards}" if cards else ""


def _table(title: str, values: dict[str, Any]) -> str:
    if not values:
        return ""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_words(value))}</td></tr>"
        for name, value in _flat(values)
    )
    return f'<section><h2>{title}</h2><div class="card"><table>{rows}</table></div></section>'


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested objects as one level, with dots in the names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _words(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return value_label(value)
    if isinstance(value, list):  # `8 x NVIDIA H100`, not eight times its name
        counts = Counter(map(str, value)).items()
        return ", ".join(f"{count} x {word}" if count > 1 else word for word, count in counts)
    return str(value)


def _events(run: RunRecord) -> str:
    if not run.events:
        return ""
    shown = run.events[-MAX_EVENT_ROWS:]
    rows = "".join(
        f"<tr><th>{escape(str(event.get('step')))}</th>"
        f"<td>{escape(str(event.get('event')))}</td><td>{escape(_rest_of(event))}</td></tr>"
        for event in shown
    )
    count = (
        f"{len(run.events):,}"
        if shown == run.events
        else f"last {len(shown)} of {len(run.events):,}"
    )
    return (
        f"<details><summary>Events ({count})</summary>"
        f'<div class="card"><table>{rows}</table></div></details>'
    )


def _rest_of(event: dict[str, Any]) -> str:
    rest = {k: v for k, v in event.items() if k not in ("time", "step", "event")}
    return ", ".join(f"{name} {_words(value)}" for name, value in _flat(rest))


def _config(run: RunRecord) -> str:
    if not run.config_text:
        return ""
    return (
        "<details><summary>Config</summary>"
        f'<div class="card"><pre>{escape(run.config_text)}</pre></div></details>'
    )
