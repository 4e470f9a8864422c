"""Save the panels of conf/dashboard/ as a workspace in W&B, or as its JSON in a file. Seconds; builds no run."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.mode.wandb_workspace import as_json, make_workspace
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
            "pip install -e '.[dashboard]'",
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
