"""Save the panels of conf/dashboard/ as a workspace in W&B, or as its JSON in a file. Seconds; builds no run."""

import contextlib
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from recipes.config.check.dashboard import DEFAULTS, check_sections
from recipes.config.overrides import for_shell, make_override
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError, type_extra
from recipes.files import write_atomically
from recipes.run_folder import claim_output, has_keys
from recipes.runtime.console import LOGGER

DASHBOARD_FILE = "dashboard.json"
_IS_OWN = has_keys("entity", "project", "spec")
TIMEOUT_SECONDS = 10  # without a response by then the server counts as unreachable


def dashboard(
    resolved: ResolvedRun,
    *,
    sections: list[dict[str, Any]],
    entity: str | None,
    project: str,
    title: str | None,
    path: str | None,
) -> int:
    """Save the workspace in W&B and log its address; without a key or a network write its JSON. Return the exit code.

    Args:
        resolved: The composed command; without access to W&B the JSON is written to its run folder.
        sections: The sections, as in conf/dashboard/.
        entity: Account or team that owns the project; None: the account's default.
        project: The project whose runs the workspace shows.
        title: The workspace's title; None: the project's name.
        path: Write only the JSON, to this file; None: save the workspace in W&B.

    Raises:
        ConfigError: The sections are invalid, a package is missing, or W&B rejects the workspace.
    """
    _check_packages()
    shown_title = title if title is not None else project

    def make(entity: str) -> Any:
        return make_workspace(sections, entity=entity, project=project, title=shown_title)

    if path is not None:
        file = claim_output(path, "mode.path", is_file=True, replaces=_IS_OWN)
        write_atomically(file, as_json(make(entity or "")) + "\n")
        LOGGER.info(f"The workspace's JSON is in {path}; to send it: the same command without mode.path=")
        return 0
    api, reason = _connect()
    if api is None:
        folder = resolved.run_folder  # may not exist yet
        target = (folder if folder.is_dir() else folder.parent) / DASHBOARD_FILE
        file = claim_output(target, "mode.path", is_file=True, replaces=_IS_OWN)
        write_atomically(file, as_json(make(entity or "")) + "\n")
        LOGGER.info(
            f"Nothing was sent: {reason}; the workspace's JSON is in {file};"
            " to send it: `wandb login`, then this command again"
        )
        return 0
    LOGGER.info(f"The workspace is at {_send(make, api, entity, project)}")
    return 0


def _check_packages() -> None:
    try:
        import wandb  # noqa: F401
        import wandb_workspaces.workspaces  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "mode=dashboard",
            f"it needs the package {str(error.name).partition('.')[0]}, which is not installed",
            type_extra("dashboard"),
        ) from error


def _connect() -> tuple[Any, str]:
    """Return W&B's API, or None, and the reason. Never prompts and never waits longer than the timeout."""
    import wandb

    mode = os.environ.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled", "dryrun"):
        return None, f"WANDB_MODE={mode}"
    try:
        with _without_terminal():
            return wandb.Api(timeout=TIMEOUT_SECONDS), ""
    except wandb.errors.UsageError:
        return None, "there is no W&B key"
    except wandb.errors.Error as error:
        return None, f"W&B denies access: {str(error).splitlines()[0].rstrip('.')}"


@contextlib.contextmanager
def _without_terminal() -> Iterator[None]:
    """Hide the terminal from wandb, which otherwise prompts for a key."""
    terminal = sys.stdin
    with open(os.devnull, encoding="utf-8") as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = terminal


def _send(make: Callable[[str], Any], api: Any, entity: str | None, project: str) -> str:
    """Save the workspace and return its address."""
    try:
        workspace = make(entity or api.default_entity)
        workspace.save()
    except ConfigError:
        raise
    except Exception as error:  # the transport raises several unrelated types
        raise ConfigError(
            f"mode.entity={entity or 'null'} mode.project={project}",
            f"W&B rejects the workspace: {str(error).splitlines()[0]}",
            "mode.entity=<yours> mode.project=<one that has a run with logger=wandb>",
        ) from error
    return str(workspace.url)


# Build a W&B workspace from plain lists of sections and panels with wandb-workspaces. No network access.

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
