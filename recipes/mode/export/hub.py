"""Push a verified export to a repository of the Hugging Face hub.

The token is that of the environment: `HF_TOKEN`, or what `hf auth login` has stored. No setting holds it, and nothing
prints it.
"""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError
from recipes.foreign_file import describe_error
from recipes.runtime import status
from recipes.runtime.console import LOGGER

_WITH_TOKEN = "HF_TOKEN=<a token that may write> before the command, or hf auth login"
# status of an answer -> what it means, and what to type
_ANSWERS = {
    401: ("the hub does not accept the token", _WITH_TOKEN),
    403: ("the token may not write there", "HF_TOKEN=<a token that may write there> before the command"),
    404: ("the hub knows no such user or organization", "mode.push_to=<user or organization of yours>/<name>"),
}


def check_token(push_to: str) -> None:
    """Check that there is a token, before an export takes its minutes.

    Raises:
        ConfigError: There is none.
    """
    from huggingface_hub import get_token

    if not get_token():
        raise ConfigError(f"mode.push_to={push_to}", "there is no token for the hub", _WITH_TOKEN)


def push(folder: Path, push_to: str, *, private: bool, files: Sequence[str], owned: Sequence[str]) -> str | None:
    """Create a repository unless there is one, and commit the files of an export to it.

    Args:
        folder: The export.
        push_to: `<user or organization>/<name>`.
        private: Whether a new repository is private; one that is there stays as it is.
        files: Names of the files.
        owned: Patterns of the files of an earlier export, which are deleted there unless they are among `files`.

    Returns:
        None, or why it failed, in a line.
    """
    import huggingface_hub
    from huggingface_hub import utils

    status.say(f"pushing {folder} to {push_to}")
    were_shown = not utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(push_to, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=push_to,
            folder_path=folder,
            allow_patterns=[*files],
            delete_patterns=[*owned],
            commit_message="Export of lightning-recipes",
        )
    except Exception as error:  # its own, and those of whichever library it sends with
        LOGGER.error(traceback.format_exc(), extra={"console": False})
        return _explain(error, push_to)
    finally:
        if were_shown:
            utils.enable_progress_bars()
    LOGGER.info(f"Pushed to {address}")
    return None


def _explain(error: Any, push_to: str) -> str:
    """Return what was set, why the hub did not take it, and what to type."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    if code in _ANSWERS:
        reason, fix = _ANSWERS[code]
    elif code is not None:
        reason, fix = f"the hub answers with status {code}", "the same command later"
    else:
        reason = f"the hub cannot be reached ({describe_error(error)})"
        fix = "the same command where there is a network"
    return f"mode.push_to={push_to}: {reason}; type {fix}"
