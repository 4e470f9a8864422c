"""Build a W&B workspace from plain lists of sections and panels with wandb-workspaces. No network access."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.errors import ConfigError

STEP = "trainer/global_step"  # the x axis of every line plot
KINDS = ("line", "bar", "parallel")
_DEFAULTS: dict[str, Any] = {"kind": "line", "log_scale": False}
_SECTION_KEYS = {"title": str, "panels": list}
_PANEL_KEYS = {
    "title": str,
    "metrics": list,
    "kind": str,
    "log_scale": bool,
    "picture": bool,  # used for curves.png only
    "parameters": list,
}


def make_workspace(sections: Sequence[dict[str, Any]], *, entity: str, project: str, title: str) -> Any:
    """Return an unsaved `wandb_workspaces.workspaces.Workspace`.

    Args:
        sections: The sections, as in conf/dashboard/.
        entity: The account or team that owns the project.
        project: The project whose runs are shown.
        title: The workspace's title.

    Raises:
        ConfigError: A section or a panel is invalid.
    """
    import wandb_workspaces.workspaces as ws

    for number, section in enumerate(sections):
        _check_section(f"dashboard.sections[{number}]", section)
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

    panel = _DEFAULTS | panel
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


def _check_section(where: str, section: object) -> None:
    _check_keys(where, section, _SECTION_KEYS, required=("title", "panels"))
    assert isinstance(section, dict)
    for number, panel in enumerate(section["panels"]):
        _check_panel(f"{where}.panels[{number}]", panel)


def _check_panel(where: str, panel: object) -> None:
    _check_keys(where, panel, _PANEL_KEYS, required=("title", "metrics"))
    assert isinstance(panel, dict)
    for key in ("metrics", "parameters"):
        names = panel[key] if key in panel else ["-"]
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{where}.{key}={names}", "it needs a list of names", f"{key}: [<name>, …]")
    kind = (_DEFAULTS | panel)["kind"]
    if kind not in KINDS:
        raise ConfigError(f"{where}.kind={kind}", f"the kinds are {', '.join(KINDS)}", "kind: <one of them>")
    if (kind == "parallel") != ("parameters" in panel):
        needs = "needs" if kind == "parallel" else "has no"
        fix = "parameters: [<key of the config>, …]" if needs == "needs" else "kind: parallel"
        raise ConfigError(f"{where}.kind={kind}", f"a {kind} panel {needs} parameters", fix)
    patterns = [name for name in panel["metrics"] if "*" in name]
    if kind != "line" and patterns:
        raise ConfigError(
            f"{where}.metrics={patterns}",
            f"a {kind} panel cannot use patterns",
            "metrics: [<full name>, …]",
        )


def _check_keys(where: str, node: object, types: Mapping[str, type], *, required: tuple[str, ...]) -> None:
    if not isinstance(node, dict):
        raise ConfigError(f"{where}={node}", f"it needs {', '.join(types)}", f"{{{required[0]}: …, …}}")
    for key, value in node.items():
        if key not in types:
            raise ConfigError(f"{where}.{key}={value}", f"there is no key {key!r}", f"one of {', '.join(types)}")
        if not isinstance(value, types[key]):
            expected = {str: "text", list: "a list", bool: "true or false"}[types[key]]
            raise ConfigError(f"{where}.{key}={value}", f"it must be {expected}", f"{key}: <{expected}>")
    for key in required:
        if key not in node:
            raise ConfigError(f"no {where}.{key}", f"it needs {' and '.join(required)}", f"{key}: …")
