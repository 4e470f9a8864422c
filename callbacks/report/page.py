"""Write the report of one run: a picture and a self-contained HTML page. Takes a second or two, no Lightning."""

import logging
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..diagnosis.diagnose import Diagnosis, examine
from ..diagnosis.run import make_run
from ..files import tolerating
from ..progress.text import REWARD, TRAIN_LOSS, VAL_LOSS, clock_text
from .charts.figures import column_spans, padded_range, steps_figure
from .charts.png import write_png
from .charts.series import Group, Mark, get_groups, get_marks, is_marked, metrics_not_drawn
from .classes import Classes, read_classes
from .compare.values import get_directions
from .config import config_lines
from .dashboard import add_own, get_sections, sections_for
from .html import anchor_id, flatten, measure_text, render, time_text, value_text, write_page
from .mode_pages import memory_figure
from .retrieval import Retrieved, read_retrieved
from .run_record import RecordedFit, RunRecord, add_fit, get_status, is_finite, read_run, status_class

log = logging.getLogger("lightning_recipes")


def write_report(
    run_folder: Path | str,
    dashboard: Sequence[Mapping[str, Any]] | None = None,
    *,
    fit: RecordedFit | None = None,
) -> None:
    """Write `report.html` and `curves.png` to a run folder, from the files in it.

    A file that a full disk rejects is logged, and so is a picture for which matplotlib is missing. A damaged file, such
    as `summary.json` or `plan.json`, is named on the page and in a warning, and the rest is shown.

    Needs `metrics.csv` unless `fit` is given; uses `summary.json`, `environment.json`, `config.yaml`, `plan.json`,
    `events.jsonl`, `samples.jsonl`, `answers.jsonl`, `classes_<split>.json`, `retrieval_<split>.json`, `spikes/` and
    `profile/operators.json` if they exist. Can be called again.

    Args:
        run_folder: The folder of a run, or any folder with a `metrics.csv`.
        dashboard: Sections of panels, as in `conf/dashboard/default.yaml`; None draws all metrics, grouped by prefix.
        fit: What `RunReport` has recorded of a fit that writes no such files; None reads them.

    Raises:
        FileNotFoundError: There is no `metrics.csv`.
        ValueError: `metrics.csv` has no `step` column.
    """
    run_folder = Path(run_folder)
    run = read_run(run_folder, needs_metrics=fit is None)
    if fit is not None:
        run = add_fit(run, fit)
    sections = sections_for(run.series) if dashboard is None else add_own(get_sections(dashboard), run.series)
    groups, marks = get_groups(run, sections), get_marks(run.events)
    page = page_html(run, groups, marks)
    for damage in run.damaged:
        log.warning(f"{run_folder}: {damage}; the report leaves it out")
    with tolerating(run_folder / "report.html"):
        write_page(run_folder / "report.html", page)
    pictures = [chart for group in groups for chart in group.charts if chart.picture]
    if not pictures:
        return
    try:
        with tolerating(run_folder / "curves.png"):
            write_png(run_folder / "curves.png", title=run.name, charts=pictures, marks=marks)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        log.warning("no curves.png: it needs matplotlib; type: pip install matplotlib")


def page_html(run: RunRecord, groups: Sequence[Group], marks: Sequence[Mark]) -> str:
    """Return the complete HTML page; what is damaged in the run's files is added to `run.damaged`."""
    drawn = []
    for number, group in enumerate(groups):
        spans = column_spans(len(group.charts), leads=number == 0)
        figures = [steps_figure(chart, span=span) for chart, span in zip(group.charts, spans, strict=True)]
        drawn.append((group.title, figures))
    all_figures = [figure for _, figures in drawn for figure in figures]
    first, last = padded_range(groups[0].charts[0].x_range) if groups else (0, 1)
    try:
        memory = memory_figure(run.plan)
    except ValueError as error:
        memory = None
        run.damaged.append(f"plan.json could not be read: {error}")
    classes, retrieved = list(_get_classes(run)), list(_get_retrieved(run))
    links = [(anchor_id(title), title) for title, _ in drawn]
    titles = [*(each.title for each in classes), *(each.title for each in retrieved)]
    links += [(anchor_id(title), title.lower()) for title in titles]
    links += [("spikes", "spike dumps")] if run.spikes else []
    return render(
        "run.jinja",
        figures=[*all_figures, *([] if memory is None else [memory])],
        page={"first": first, "last": last, "marks": [[mark.step, mark.event, mark.from_step] for mark in marks]},
        title=run.name,
        run=run,
        status=get_status(run),
        facts=_head_facts(run),
        overrides=run.overrides,
        examined=_examine(run),
        diagnosis=[event for event in run.events if event.get("event") == "diagnosis" and event.get("text")],
        tiles=list(_tiles(run)),
        links=[*links, ("tables", "tables")] if groups else [],
        kinds=Counter(str(event["event"]) for event in run.events if is_marked(event)),
        groups=drawn,
        not_drawn=metrics_not_drawn(run, groups),
        samples=get_samples(run),
        answers=get_answers(run),
        completions=get_completions(run),
        classes=classes,
        retrieved=retrieved,
        operators=get_operators(run),
        spikes=get_spikes(run),
        program=_get_program(run),
        replay=get_replay(run),
        plan=get_plan(run),
        memory=memory,
        evaluations=get_evaluations(run),
        summary={name: value for name, value in run.summary.items() if name not in ("measures", "evaluations")},
        environment={name: value for name, value in run.environment.items() if name not in _OF_COMMAND},
        events=get_events(run),
        config=config_lines(run),
        pills={} if get_status(run) is None else {get_status(run): status_class(str(get_status(run)))},
    )


def _get_classes(run: RunRecord) -> Iterable[Classes]:
    """Yield what is shown of the classes of each split; what is damaged is added to `run.damaged`."""
    for record in run.classes:
        try:
            found = read_classes(record)
        except ValueError as error:
            run.damaged.append(f"classes_{record.get('split')}.json could not be read: {error}")
            continue
        if found is not None:
            yield found


def _get_retrieved(run: RunRecord) -> Iterable[Retrieved]:
    """Yield what is shown of the retrieval of each split; what is damaged is added to `run.damaged`."""
    for record in run.retrieved:
        try:
            found = read_retrieved(record)
        except ValueError as error:
            run.damaged.append(f"retrieval_{record.get('split')}.json could not be read: {error}")
            continue
        if found is not None:
            yield found


def _head_facts(run: RunRecord) -> list[str]:
    """Return start time, devices and host, and the command if no overrides are recorded."""
    seconds = run.events[0].get("time") if run.events else None
    start = [time_text(seconds)] if isinstance(seconds, (int, float)) and seconds else []
    keys = ("devices", "hostname") if run.overrides else ("devices", "hostname", "command")
    return start + [value_text(run.environment[key]) for key in keys if run.environment.get(key)]


def _examine(run: RunRecord) -> Diagnosis | None:
    """Return the findings in the run's curves; None without a training loss."""
    found = make_run(run.series, folder=run.folder, config=run.config, status=get_status(run), events=run.events)
    return examine(found) if "loss" in found.curves else None


def _tiles(run: RunRecord) -> Iterable[tuple[str, str, str]]:
    """Yield name, value and note of each key figure, from the summary if it exists, else from the last row."""
    summary = run.summary
    losses = {"train loss": ("train_loss", _last(run, TRAIN_LOSS)), "val loss": ("val_loss", _last(run, VAL_LOSS))}
    rewards = {
        name.removesuffix("/mean").replace("/", " ").replace("_", " "): ("", run.last(name))
        for name in (REWARD, "val/reward", "val/exact_match")
    }
    tokens_per_second = _last(run, ("throughput/tokens_per_second",))
    is_text = tokens_per_second is not None or summary.get("tokens_per_second") is not None
    figures = {
        **(losses | _measured(run) if run.last(REWARD) is None else rewards),
        "tokens/s": ("tokens_per_second", tokens_per_second),
        **({} if is_text else {"samples/s": ("samples_per_second", _last(run, ("throughput/samples_per_second",)))}),
        "MFU": ("mfu", None),
        "steps": ("steps", run.last_step),
        "tokens": ("tokens", None),
        "time": ("seconds", None),
        "peak memory": ("peak_memory_gib", None),
    }
    notes = {"peak memory": "GiB"}
    best = summary.get("best_val_loss")
    if is_finite(best):
        notes["val loss"] = f"best {best:.4g}"
    for name, (key, last) in figures.items():
        value = summary.get(key)
        if value is not None and not isinstance(value, float) and not is_finite(value):
            run.damaged.append(f"summary.json could not be read: its {key} is not a finite number")
            value = None
        if value is None or (name in ("steps", "tokens") and not value):  # no step yet, and samples without tokens
            value = last
        if value is not None:
            yield name, _tile_value(name, value) if is_finite(value) else "not finite", notes.get(name, "")


def _measured(run: RunRecord) -> dict[str, tuple[str, float | None]]:
    """Return the last value of the first metric of which the run declares that a higher value is better."""
    declared = get_directions([run]) or {"val/accuracy": True}
    name = next((name for name, is_high in declared.items() if is_high and run.last(name) is not None), None)
    return {} if name is None else {name.replace("/", " ").replace("_", " "): ("", run.last(name))}


def _last(run: RunRecord, metrics: Iterable[str]) -> float | None:
    """Return the last value of the first of `metrics` that was logged."""
    return next((last for name in metrics if (last := run.last(name)) is not None), None)


def _tile_value(name: str, number: float) -> str:
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


# Rows of the tables of a run's page: plan, generated text, operators, spikes, events. No Lightning.

MAX_EVENT_ROWS = 200
MAX_OPERATORS = 20
MAX_ANSWERS = 12
# event fields omitted from the details in its row
_COMMON_FIELDS = ("time", "step", "event", "mark", "kept_on_resume")

_OF_COMMAND = ("overrides", "program", "classes", "own_code")  # of environment.json, and no fact of the machine
_PLAN_TITLES = {
    "steps": "optimizer steps",
    "samples": "samples",
    "tokens": "tokens",
    "global_batch_size": "global batch size",
    "step_seconds": "seconds per step",
    "seconds": "time",
    "tokens_per_second": "tokens per second",
    "samples_per_second": "samples per second",
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
    if _has_own_loaders(config.get("data")):
        settings = {"steps": settings["steps"]}  # they decide what a batch is
    known: dict[str, float] = {name: value for name, value in settings.items() if is_finite(value) and value > 0}
    planned: dict[str, float] = {}
    if "steps" in known:
        planned["steps"] = known["steps"]
        if "global_batch_size" in known:
            planned["samples"] = known["steps"] * known["global_batch_size"]
            if "seq_len" in known and not (_has_padding(config.get("data")) or config.get("rollout")):
                planned["tokens"] = planned["samples"] * known["seq_len"]
    if "global_batch_size" in known:
        planned["global_batch_size"] = known["global_batch_size"]
    return {name: value for name, value in {**planned, **run.plan}.items() if is_finite(value)}


def _has_own_loaders(data: Any) -> bool:
    """Return whether a LightningDataModule has the loaders."""
    return isinstance(data, dict) and "module" in data


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


def get_answers(run: RunRecord) -> tuple[list[str], list[list[str]], str] | None:
    """Return heads, rows and a note of the newest answers to validation questions, beside those of the start.

    None without any. The start is step 0 of the run's beginning; a resumed run adds none.
    """
    known = [answer for answer in run.answers if answer.get("question") and is_finite(answer.get("step"))]
    if not known:
        return None
    newest = known[-1]["step"]
    before: dict[str, dict[str, Any]] = {}
    for answer in known:
        if answer["step"] == 0:
            before.setdefault(str(answer["question"]), answer)
    now = {str(answer["question"]): answer for answer in known if answer["step"] == newest}
    right = "chosen" if any("rejected" in answer for answer in now.values()) else "expected"
    columns = {f"answer at step {newest}": (now, "given"), right: (now, "expected"), "rejected": (now, "rejected")}
    if before and newest > 0:
        columns = {"answer of the start": (before, "given")} | columns
    shown = {name: column for name, column in columns.items() if any(column[1] in each for each in column[0].values())}
    rows = [
        [question, *(str(source.get(question, {}).get(field, "")) for source, field in shown.values())]
        for question in [*now][:MAX_ANSWERS]
    ]
    note = f"{len(rows)} of {len(now)} questions"
    scores = [[each["score"] for each in of_step.values() if is_finite(each.get("score"))] for of_step in (before, now)]
    if all(scores) and newest > 0:
        note += f"; right: {statistics.mean(scores[0]):.0%} at the start, {statistics.mean(scores[1]):.0%} now"
    return ["question", *shown], rows, note


def get_completions(run: RunRecord) -> tuple[list[str], list[list[str]], str] | None:
    """Return heads, rows and a note of the newest completions of a policy, the best and the worst; None without any."""
    known = [each for each in run.completions if is_finite(each.get("step")) and is_finite(each.get("reward"))]
    if not known:
        return None
    newest = known[-1]["step"]
    now = sorted((each for each in known if each["step"] == newest), key=lambda each: -float(each["reward"]))
    shown = now if len(now) <= MAX_ANSWERS else [*now[: MAX_ANSWERS // 2], *now[-(MAX_ANSWERS // 2) :]]
    scored = [name for name in now[0] if name.startswith("reward/")]
    scored = scored if len(scored) > 1 else []  # the reward is the only one
    rows = [
        [
            *(str(each.get(name, "")) for name in ("prompt", "completion", "reference")),
            *(value_text(each.get(name)) for name in ("reward", *scored, "advantage", "tokens")),
            "yes" if each.get("ended") else "no",
        ]
        for each in shown
    ]
    return (
        ["prompt", "completion", "reference", "reward", *scored, "advantage", "tokens", "ended"],
        rows,
        f"step {value_text(newest)}: {len(rows)} of {len(now)} written: the highest rewards and the lowest",
    )


def get_evaluations(run: RunRecord) -> tuple[list[str], list[list[str]]] | None:
    """Return heads and rows of the evaluations in the summary, a column each; None without any."""
    found = run.summary.get("evaluations")
    named = (
        {str(name): each for name, each in found.items() if isinstance(each, dict)} if isinstance(found, dict) else {}
    )
    if not named:
        return None
    measures = dict.fromkeys(str(key) for each in named.values() for key in each)  # in their order
    facts = [name for name in ("checkpoint", "weights") if name in measures]
    ordered = [*facts, *(name for name in measures if name not in (*facts, "data"))]
    rows = [[name, *(value_text(each[name]) if name in each else "" for each in named.values())] for name in ordered]
    return ["", *named], rows


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
    classes, newest = run.environment.get("classes", []), run.spikes[-1].get("step")
    words = [*own_options, "mode=replay", f"resume={run.folder}", *map(str, classes), f"mode.step={newest}"]
    return f"{_get_program(run)} {shlex.join(words)}"


def _get_program(run: RunRecord) -> str:
    """Return the command without its overrides, with the folders in which it finds code of somebody's own."""
    return str(run.environment.get("program", "python train.py"))


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
