"""The panels of conf/dashboard/ as a workspace in W&B, or as its JSON in a file. Seconds; no run is built."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipes.config.compose import Composed
from recipes.errors import ConfigError
from recipes.mode.wandb_workspace import as_json, make_workspace
from recipes.runtime.console import LOGGER

DASHBOARD_FILE = "dashboard.json"
ANSWER_SECONDS = 10  # a server that does not answer within them counts as out of reach


def dashboard(
    composed: Composed,
    *,
    sections: list[dict[str, Any]],
    entity: str | None,
    project: str,
    title: str | None,
    path: str | None,
) -> int:
    """Save the workspace in W&B and print its address; without a key or a network write its JSON.

    Args:
        composed: Whose folder takes the JSON where there is one.
        sections: As conf/dashboard/ holds them.
        entity: Account or team that owns the project; None: the account's default.
        project: Whose runs the workspace shows.
        title: Of the workspace; None: the project's name.
        path: A file for the JSON, which then is all that is made.

    Raises:
        ConfigError: The sections have an error, a package is missing, or W&B refuses the workspace.
    """
    _find_packages()
    shown = title if title is not None else project

    def make(entity: str) -> Any:
        return make_workspace(sections, entity=entity, project=project, title=shown)

    if path is not None:
        _write(make(entity or ""), Path(path))
        LOGGER.info(f"The workspace's JSON is in {path}; to send it: the same without mode.path=")
        return 0
    api, why = _connect()
    if api is None:
        file = _default_file(composed)
        _write(make(entity or ""), file)
        LOGGER.info(
            f"Nothing was sent: {why}; the workspace's JSON is in {file};"
            " to send it: `wandb login`, then this command again"
        )
        return 0
    LOGGER.info(f"The workspace is at {_send(make, api, entity, project)}")
    return 0


def _find_packages() -> None:
    try:
        import wandb  # noqa: F401
        import wandb_workspaces.workspaces  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "mode=dashboard",
            f"it needs the package {str(error.name).partition('.')[0]}, which is not installed",
            "pip install -e '.[dashboard]'",
        ) from error


def _connect() -> tuple[Any, str]:
    """W&B's interface, asked for nothing and with an answer in time; or None, and why there is none."""
    import wandb

    mode = os.environ["WANDB_MODE"] if "WANDB_MODE" in os.environ else "online"
    if mode in ("offline", "disabled", "dryrun"):
        return None, f"WANDB_MODE={mode}"
    try:
        with _nobody_to_ask():
            return wandb.Api(timeout=ANSWER_SECONDS), ""
    except wandb.errors.UsageError:
        return None, "there is no W&B key"
    except wandb.errors.Error as error:
        return None, f"W&B gives no access: {str(error).splitlines()[0].rstrip('.')}"


@contextlib.contextmanager
def _nobody_to_ask() -> Iterator[None]:
    """wandb asks for a key only where there is a terminal to answer at."""
    terminal = sys.stdin
    with open(os.devnull) as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = terminal


def _send(make: Callable[[str], Any], api: Any, entity: str | None, project: str) -> str:
    """The address of the workspace."""
    try:
        workspace = make(entity or api.default_entity)
        workspace.save()
    except ConfigError:
        raise
    except Exception as error:  # of the transport, by several names
        raise ConfigError(
            f"mode.entity={entity or 'null'} mode.project={project}",
            f"W&B refuses the workspace: {str(error).splitlines()[0]}",
            "mode.entity=<yours> mode.project=<one that has a run with logger=wandb>",
        ) from error
    return str(workspace.url)


def _default_file(composed: Composed) -> Path:
    """In the run folder, or among the runs of that name where this command has made none."""
    folder = composed.run_folder
    return (folder if folder.is_dir() else folder.parent) / DASHBOARD_FILE


def _write(workspace: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(workspace) + "\n")
