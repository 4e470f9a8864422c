"""What is drawn of a run: sections of panels, from plain lists as a YAML file holds them. No Lightning."""

import fnmatch
import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["line", "bar", "parallel"]

_OF_LEARNING = ("train", "val", "valid", "validation", "test")  # what strangers' names begin with
_LOG_WORDS = ("loss", "norm", "perplexity", "scale")
_MAX_PICTURES = 8


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One drawing.

    Attributes:
        metrics: Names, in the order of their curves; `*` stands for any characters.
        kind: Curves over steps; or, of several runs, a bar or a line through `parameters` for each of them.
        log_scale: Whether a wide range makes the axis logarithmic.
        picture: Whether it is part of curves.png too.
        parameters: Of the config, with dots: the axes of a parallel panel.
    """

    title: str
    metrics: tuple[str, ...]
    kind: Kind = "line"
    log_scale: bool = False
    picture: bool = False
    parameters: tuple[str, ...] = ()

    def metrics_among(self, written: Iterable[str]) -> list[str]:
        """Those of a run that this panel draws, each once, in the panel's order."""
        names = list(written)
        found = [name for pattern in self.metrics for name in names if _matches(name, pattern)]
        return list(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def get_sections(dashboard: Sequence[Mapping[str, Any]]) -> list[Section]:
    """A dashboard's `sections`, as YAML holds them.

    Raises:
        TypeError: A panel has a word that panels do not have.
    """
    return [
        Section(title=section["title"], panels=tuple(_panel(one) for one in section["panels"]))
        for section in dashboard
    ]


def sections_for(written: Iterable[str]) -> list[Section]:
    """Sections where no dashboard is given: one for each prefix, learning first; every metric is drawn once.

    `train/loss` and `val/loss`, or Lightning's `train_loss_step` and `val_loss`, share a panel.
    """
    found: dict[str, dict[str, list[str]]] = {"learning": {}}
    for name in written:
        section, panel = _place(name)
        found.setdefault(section, {}).setdefault(panel, []).append(name)
    found["learning"] = dict(sorted(found["learning"].items(), key=lambda item: _rank(item[0])))
    sections = [(title, panels) for title, panels in found.items() if panels]
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
                    log_scale=any(word in panel for word in _LOG_WORDS),
                    picture=(title, panel) in pictures[:_MAX_PICTURES],
                )
                for panel, names in panels.items()
            ),
        )
        for title, panels in sections
    ]


def _panel(words: Mapping[str, Any]) -> Panel:
    lists = {name: tuple(words[name]) for name in ("metrics", "parameters") if name in words}
    return Panel(**{**words, **lists})


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _place(name: str) -> tuple[str, str]:
    """Section and panel of a metric."""
    head, _, rest = name.partition("/")
    if not rest:
        head, _, rest = name.partition("_")
        if head not in _OF_LEARNING or not rest:
            if name.startswith("lr"):  # LearningRateMonitor writes lr-Adam
                return "learning", "learning rate"
            return ("learning", name) if name == "loss" else ("other", name.replace("_", " "))
    if head == "lr":
        return "learning", "learning rate"
    short = rest.removesuffix("_step").removesuffix("_epoch")
    if head in _OF_LEARNING:
        return "learning", "learning rate" if short == "lr" else short.replace("_", " ")
    first, _, deeper = rest.partition("/")
    return head, (f"{first} by {head}" if deeper else first).replace("_", " ")


def _rank(panel: str) -> int:
    """Loss first, the learning rate last."""
    return {"loss": 0, "learning rate": 2}[panel] if panel in ("loss", "learning rate") else 1
