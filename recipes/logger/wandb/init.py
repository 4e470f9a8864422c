"""Open a W&B run online or offline, without a prompt and without a long wait."""

import logging
import netrc
import os
import shlex
import urllib.parse
from pathlib import Path
from typing import Any

from recipes.logger.wandb.session import first_line

LOGGER = logging.getLogger("lightning_recipes")
DEFAULT_PROJECT = "lightning-recipes"
CODE = Path(__file__).parents[3]
_FLUSH_SECONDS = 1.0  # W&B writes its file this often; its own default, 15 s, is what a kill could lose


def open_run(folder: Path, run_id: str, *, init_timeout_seconds: float, **settings: Any) -> Any:
    """Open a run online if there is a key and the server responds, else offline with a line on how to upload it.

    Args:
        folder: The run folder; W&B keeps its files in `wandb` there.
        run_id: The run's id in W&B.
        init_timeout_seconds: Time for the server to respond.
        settings: Further arguments of `_get_settings`.

    Returns:
        W&B's run; None if WANDB_MODE=disabled.
    """
    import wandb

    # files that wait for their upload belong in the run folder too, not in the home folder
    os.environ.setdefault("WANDB_DATA_DIR", str((folder / "wandb").resolve()))
    user = wandb.setup(settings=wandb.Settings(silent=True)).settings
    if user.mode == "disabled":
        return None
    settings |= {"run_id": run_id, "init_timeout": init_timeout_seconds, "root_dir": str(folder)}
    settings["project"] = settings["project"] or user.project or DEFAULT_PROJECT
    if user.mode in ("offline", "dryrun"):
        reason = "WANDB_MODE=offline"
    elif not _has_key(user):
        reason = "there is no API key"
    else:
        try:
            run = wandb.init(settings=_get_settings(user.mode, **settings))
        except Exception as error:
            reason = first_line(error)
            wandb.teardown(exit_code=1)  # its process still holds the run
        else:
            LOGGER.info(f"W&B: {run.url}")
            return run
    run = wandb.init(settings=_get_settings("offline", **settings))
    files = f"{shlex.quote(str(folder / 'wandb'))}/offline-run-*"
    LOGGER.info(f"W&B: {reason}, so this run is kept offline; to upload it: wandb sync {files}")
    return run


def _get_settings(mode: str, *, finish_timeout_seconds: float, keeps_artifacts: bool, **settings: Any) -> Any:
    """Return W&B's settings, without those that the installed version does not support."""
    import wandb

    settings |= {
        "mode": mode,
        "resume": "allow",
        "silent": True,
        "console": "off",  # train.log has it
        "git_root": str(CODE),  # wherever the run was started from
        "finish_timeout": finish_timeout_seconds,
        "x_transaction_log_flush_interval": _FLUSH_SECONDS,
        # a table is then a file in the run folder, not one in the home folder
        "allow_offline_artifacts": keeps_artifacts,
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in settings.items() if name in known and value is not None})


def _has_key(settings: Any) -> bool:
    """Return whether W&B would find a key for its server without a prompt."""
    if settings.api_key or settings.identity_token_file:
        return True
    netrc_path = os.environ.get("NETRC")
    paths = [Path(netrc_path)] if netrc_path else [Path.home() / ".netrc", Path.home() / "_netrc"]
    host = urllib.parse.urlsplit(settings.base_url).netloc
    for path in paths:
        try:
            if netrc.netrc(str(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
