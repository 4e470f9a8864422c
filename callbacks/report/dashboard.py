"""Parse or derive the sections and panels of a dashboard. No Lightning."""

import fnmatch
import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["line", "bar", "parallel"]

# prefixes of metrics in the learning section, other projects' names included
_LEARNING_PREFIXES = ("train", "val", "valid", "validation", "test")
_LOG_SCALE_NAMES = ("loss", "norm", "perplexity", "scale")
_MAX_PICTURES = 8


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart, or one chart per metric on the comparison page.

    Attributes:
        metrics: Names in the order of their curves; `*` matches any characters.
        kind: `line`, curves over steps; on the comparison page also `bar`, one bar per run, or `parallel`, one line
            per run through `parameters`.
        log_scale: Whether the axis becomes logarithmic when the values span a wide range.
        picture: Whether the panel is also part of curves.png.
        parameters: Config keys with dots: the axes of a parallel panel.
        unless: Metric of the runs that this panel leaves out; empty: none. The loss of a policy says nothing of it.
        not_matched: Metrics that other panels name in full, which no `*` of this one matches.
    """

    title: str
    metrics: tuple[str, ...]
    kind: Kind = "line"
    log_scale: bool = False
    picture: bool = False
    parameters: tuple[str, ...] = ()
    unless: str = ""
    not_matched: frozenset[str] = frozenset()

    def metrics_among(self, written: Iterable[str]) -> list[str]:
        """Return the metrics that this panel draws of those that a run has logged, each once, in the panel's order."""
        names = list(written)
        if self.unless in names:
            return []
        found = [
            name
            for pattern in self.metrics
            for name in names
            if name == pattern or (name not in self.not_matched and fnmatch.fnmatchcase(name, pattern))
        ]
        return list(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class Section:
    """Panels under one heading; with `adds_own`, also of metrics that no panel names, see `add_own`."""

    title: str
    panels: tuple[Panel, ...]
    adds_own: bool = False


def get_sections(dashboard: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Parse the `sections` list of a dashboard YAML file.

    Raises:
        TypeError: A panel has an unknown key.
    """
    named = frozenset(name for section in dashboard for panel in section["panels"] for name in panel["metrics"])
    return [
        Section(
            title=section["title"],
            panels=tuple(_parse_panel(panel, named) for panel in section["panels"]),
            adds_own=section.get("adds_own", False),
        )
        for section in dashboard
    ]


def sections_for(written: Iterable[str]) -> list[Section]:
    """Return sections that draw every metric exactly once: one per prefix, learning first.

    `train/loss` and `val/loss`, or Lightning's `train_loss_step` and `val_loss`, share a panel.
    """
    by_section: dict[str, dict[str, list[str]]] = {"learning": {}}
    for name in written:
        section, panel = _place(name)
        by_section.setdefault(section, {}).setdefault(panel, []).append(name)
    learning = sorted(by_section["learning"].items(), key=lambda item: _rank(item[0]))
    by_section["learning"] = dict(learning)
    sections = [(title, panels) for title, panels in by_section.items() if panels]
    pictures = [
        (section, panel)
        for section, panels in sections
        for number, panel in enumerate(panels)
        if section == "learning" or (number == 0 and section != "other")
    ]
    return [
        Section(
            title=title,
            panels=tuple(
                Panel(
                    title=panel,
                    metrics=tuple(glob.escape(name) for name in names),
                    log_scale=any(part in panel for part in _LOG_SCALE_NAMES),
                    picture=(title, panel) in pictures[:_MAX_PICTURES],
                )
                for panel, names in panels.items()
            ),
        )
        for title, panels in sections
    ]


def add_own(sections: Sequence[Section], written: Iterable[str]) -> list[Section]:
    """Add what a module logs under names of its own, without a prefix such as `grad/`, and no panel draws.

    Its losses and learning rates join the panels of the same title. Nothing is added if no section `adds_own`.
    """
    if not any(section.adds_own for section in sections):
        return list(sections)
    panels = [panel for section in sections for panel in section.panels if panel.kind == "line"]
    names = [name for name in written if "/" not in name or name.partition("/")[0] in _LEARNING_PREFIXES]
    drawn = {name for panel in panels for name in panel.metrics_among(names)}
    merged = {section.title: {panel.title: panel for panel in section.panels} for section in sections}
    for section in sections_for(name for name in names if name not in drawn):
        shown = merged.setdefault(section.title, {})
        for panel in section.panels:
            named = shown.get(panel.title)
            shown[panel.title] = panel if named is None else replace(named, metrics=named.metrics + panel.metrics)
    return [Section(title=title, panels=tuple(shown.values())) for title, shown in merged.items()]


def _parse_panel(node: Mapping[str, Any], named: frozenset[str]) -> Panel:
    lists = {name: tuple(node[name]) for name in ("metrics", "parameters") if name in node}
    return Panel(**{**node, **lists, "not_matched": named})


def _place(name: str) -> tuple[str, str]:
    """Return the section and the panel of a metric."""
    prefix, _, rest = name.partition("/")
    if not rest:
        prefix, _, rest = name.partition("_")
        if prefix not in _LEARNING_PREFIXES or not rest:
            if name.startswith("lr"):  # LearningRateMonitor writes lr-Adam
                return "learning", "learning rate"
            return ("learning", "loss") if "loss" in name.lower() else ("other", name.replace("_", " "))
    if prefix == "lr":
        return "learning", "learning rate"
    short = rest.removesuffix("_step").removesuffix("_epoch")
    if prefix in _LEARNING_PREFIXES:
        return "learning", "learning rate" if short == "lr" else short.replace("_", " ")
    first, _, deeper = rest.partition("/")
    return prefix, (f"{first} by {prefix}" if deeper else first).replace("_", " ")


def _rank(panel: str) -> int:
    """Return a sort key that puts the loss first and the learning rate last."""
    return {"loss": 0, "learning rate": 2}.get(panel, 1)
