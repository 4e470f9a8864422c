"""Build a W&B workspace from plain lists of sections and panels with wandb-workspaces. No network access."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from recipes.config.check.dashboard import DEFAULTS, check_sections
from recipes.config.overrides import for_shell, make_override
from recipes.errors import ConfigError

# categories of Unicode: So emoji, Sm < and +, Sc $, Sk ^ and `, Cs half a character
_SYMBOLS = ("So", "Sk", "Sm", "Sc", "Cs")
STEP = "trainer/global_step"  # the x axis of every line plot


def make_workspace(sections: Sequence[dict[str, Any]], *, entity: str, project: str, title: str) -> Any:
    """Return an unsaved `wandb_workspaces.workspaces.Workspace`.

    Args:
        sections: The sections, as in conf/dashboard/.
        entity: The account or team that owns the project.
        project: The project whose runs are shown.
        title: The workspace's title.

    Raises:
        ConfigError: A section or a panel is invalid, or W&B takes no such title.
    """
    import wandb_workspaces.workspaces as ws

    check_sections("dashboard.sections", sections)
    for number, section in enumerate(sections):
        for index, panel in enumerate(section["panels"]):
            _check_panel(f"dashboard.sections[{number}].panels[{index}]", panel)
    _check_title(title)
    return ws.Workspace(
        entity=entity,
        project=project,
        name=title,
        settings=ws.WorkspaceSettings(x_axis=STEP),
        sections=[
            ws.Section(
                name=section["title"],
                is_open=True,
                panel_settings=ws.SectionPanelSettings(x_axis=STEP),
                panels=[_make_panel(panel) for panel in section["panels"]],
            )
            for section in sections
        ],
    )


def as_json(workspace: Any) -> str:
    """Return the JSON that `workspace.save()` would send: entity, project, title, and W&B's `spec`."""
    view: str = workspace._model.model_dump_json(by_alias=True, exclude_none=True, indent=2)
    return view


def names_pattern(metrics: Sequence[str]) -> str:
    """Return a regular expression that matches exactly these names, with `*` as a wildcard.

    It uses only syntax with the same meaning in JavaScript, Go and Python.
    """
    names = [".*".join(re.escape(part) for part in name.split("*")) for name in metrics]
    return f"^({'|'.join(names)})$"


def _make_panel(panel: dict[str, Any]) -> Any:
    import wandb_workspaces.reports.v2 as wr

    panel = DEFAULTS | panel
    title, metrics = panel["title"], panel["metrics"]
    if panel["kind"] == "bar":
        return wr.BarPlot(title=title, metrics=metrics)
    if panel["kind"] == "parallel":
        columns = [
            *(wr.ParallelCoordinatesPlotColumn(wr.Config(name)) for name in panel["parameters"]),
            *(wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(name)) for name in metrics),
        ]
        return wr.ParallelCoordinatesPlot(title=title, columns=columns)
    is_pattern = any("*" in name for name in metrics)
    return wr.LinePlot(
        title=title,
        x=STEP,
        y=[] if is_pattern else metrics,
        metric_regex=names_pattern(metrics) if is_pattern else None,
        log_y=panel["log_scale"] or None,
    )


def _check_title(title: str) -> None:
    """Reject a title with symbols, which wandb-workspaces takes for emoji."""
    symbols = [letter for letter in dict.fromkeys(title) if unicodedata.category(letter) in _SYMBOLS]
    if symbols:
        left = " ".join("".join(letter for letter in title if letter not in symbols).split())
        reason = f"W&B takes no emoji or other symbol in the title of a workspace, such as {symbols[0]}"
        fix = for_shell(make_override("mode.title", left)) if left else "mode.title=<text>"
        raise ConfigError(f"mode.title={title}", reason, fix)


def _check_panel(where: str, panel: dict[str, Any]) -> None:
    """Reject what the pages of this project show and a workspace of W&B cannot."""
    kind = (DEFAULTS | panel)["kind"]
    if kind == "parallel" and "parameters" not in panel:
        fix = "parameters: [<key of the config>, …]"
        raise ConfigError(f"{where}.kind={kind}", f"a {kind} panel needs parameters", fix)
    patterns = [name for name in panel["metrics"] if "*" in name]
    if kind != "line" and patterns:
        raise ConfigError(
            f"{where}.metrics={patterns}",
            f"a {kind} panel cannot use patterns",
            "metrics: [<full name>, …]",
        )
