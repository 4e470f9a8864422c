"""How a W&B run is opened: which run it is, online or offline, without a question and without a long wait."""

import json
import logging
import netrc
import os
import secrets
import shlex
import urllib.parse
from pathlib import Path
from typing import Any

from recipes.logger.wandb.session import in_a_line
from recipes.run_folder import write_atomically

LOGGER = logging.getLogger("lightning_recipes")
ID_FILE = "wandb_run.json"
DEFAULT_PROJECT = "lightning-recipes"
CODE = Path(__file__).parents[3]
_FLUSH_SECONDS = 1.0  # what a kill can take from the file; W&B's own 15


def get_run_id(folder: Path, saved_id: str | None) -> str:
    """The id of a run folder: typed, kept in the folder, in the checkpoint that it goes on from, or new."""
    typed = os.environ.get("WANDB_RUN_ID")
    path = folder / ID_FILE
    if typed:
        return typed
    if path.is_file():
        kept: str = json.loads(path.read_text())["id"]
        return kept
    return saved_id or secrets.token_hex(4)


def keep_run_id(folder: Path, run_id: str) -> None:
    """So that a resume, or a requeue, goes on with this run."""
    write_atomically(folder / ID_FILE, json.dumps({"id": run_id}) + "\n")


def open_run(folder: Path, run_id: str, *, init_timeout_seconds: float, **words: Any) -> Any:
    """Online where there is a key and the server answers, else offline, with a line on how to upload it.

    Args:
        folder: Of the run: W&B keeps its files in `wandb` there.
        run_id: Which.
        init_timeout_seconds: For the server to answer.
        words: Of `_settings`.

    Returns:
        W&B's run; None where WANDB_MODE=disabled.
    """
    import wandb

    # what waits to be uploaded lies in the run's folder too, not in the home folder
    os.environ.setdefault("WANDB_DATA_DIR", str((folder / "wandb").resolve()))
    mine = wandb.setup(settings=wandb.Settings(silent=True)).settings
    if mine.mode == "disabled":
        return None
    words |= {"run_id": run_id, "init_timeout": init_timeout_seconds, "root_dir": str(folder)}
    words["project"] = words["project"] or mine.project or DEFAULT_PROJECT
    to_upload = f"to upload it: wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"
    if mine.mode in ("offline", "dryrun"):
        why = "WANDB_MODE=offline"
    elif not _has_key(mine):
        why = "there is no API key"
    else:
        try:
            run = wandb.init(settings=_settings(mine.mode, **words))
        except Exception as error:
            why = in_a_line(error)
            wandb.teardown(exit_code=1)  # its process still holds the run
        else:
            LOGGER.info(f"W&B: {run.url}")
            return run
    run = wandb.init(settings=_settings("offline", **words))
    LOGGER.info(f"W&B: {why}, so this run is kept offline; {to_upload}")
    return run


def _settings(
    mode: str, *, finish_timeout_seconds: float, keeps_artifacts: bool, **words: Any
) -> Any:
    """Quiet, and whatever this version of W&B knows of the rest."""
    import wandb

    wanted = words | {
        "mode": mode,
        "resume": "allow",
        "silent": True,
        "console": "off",  # train.log has it
        "git_root": str(CODE),  # wherever the run was started from
        "finish_timeout": finish_timeout_seconds,
        "x_transaction_log_flush_interval": _FLUSH_SECONDS,
        # a table is then a file beside the run's, not one in the home folder
        "allow_offline_artifacts": keeps_artifacts,
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(
        **{key: value for key, value in wanted.items() if key in known and value is not None}
    )


def _has_key(settings: Any) -> bool:
    """Whether W&B would find one for its server without asking."""
    if settings.api_key or settings.identity_token_file:
        return True
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    host = urllib.parse.urlsplit(settings.base_url).netloc
    for file in files:
        try:
            if netrc.netrc(str(file)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
