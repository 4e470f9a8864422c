"""Read the run that `start_from=` names: its config, its adapter and its tokenizer. Imports no torch."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.config.traits import read_adapter
from recipes.errors import ConfigError
from recipes.run_folder import CONFIG_FILE, TOKENIZER_FOLDER, find_run_folder, has_checkpoint, read_config

Config = dict[str, Any]
_OUR_ADAPTERS = "recipes.adapter."


def find_source(config: Mapping[str, Any], run_folder: Path) -> Path | None:
    """Return the path that a new run reads its first weights from; None if it resumes, or starts from nothing.

    Args:
        config: Config of the run, composed.
        run_folder: Its folder, whose own checkpoint takes precedence.
    """
    start_from, resume = config.get("start_from"), config.get("resume")
    if not isinstance(start_from, str) or (resume == "auto" and has_checkpoint(run_folder)):
        return None
    return Path(os.path.expanduser(start_from)) if resume in (None, "auto") else None


def take_tokenizer(config: Config, run_folder: Path, typed: Sequence[str]) -> Config:
    """Return the config with the tokenizer of the run that it starts from, with which its weights were trained.

    Args:
        config: Config of the run, composed.
        run_folder: Its folder. If it has a checkpoint of its own, its tokenizer is that of the run.
        typed: Overrides of this command line: a tokenizer that is typed is kept, and compared by the check.
    """
    is_typed = any(text.lstrip("+~").startswith(("tokenizer=", "tokenizer.")) for text in typed)
    before = config.get("tokenizer")
    if not isinstance(config.get("start_from"), str) or is_typed or not isinstance(before, dict) or not before:
        return config
    if config.get("resume") == "auto" and has_checkpoint(run_folder):
        run: Path | None = run_folder
    else:
        source = find_source(config, run_folder)
        run = None if source is None else find_run_folder(source)
    folder = None if run is None else run / TOKENIZER_FOLDER
    if folder is None or not folder.is_dir():
        return config
    return _replace(config, before, {"_target_": "recipes.tokenizer.huggingface.HuggingFace", "name": str(folder)})


def _replace(section: Config, before: Config, now: Config) -> Config:
    """Return a section with one node in place of another, wherever it is: `tokenizer: ${tokenizer}` copies it."""
    return {
        key: now if value == before else _replace(value, before, now) if isinstance(value, dict) else value
        for key, value in section.items()
    }


def read_source(folder: Path) -> Config:
    """Return the frozen config of a run to start from; empty where it says nothing about its model.

    Raises:
        ConfigError: The file cannot be read.
    """
    frozen = read_config(folder) if (folder / CONFIG_FILE).is_file() else {}
    return frozen if isinstance(frozen.get("model"), dict) else {}


def read_source_adapter(folder: Path) -> Config | None:
    """Return the config node of the adapter of a run; None if it trained all weights.

    Raises:
        ConfigError: It is none of this project's: a folder may not choose the code that runs.
    """
    node = read_source(folder).get("adapter")
    if not isinstance(node, dict):
        return None
    target = str(node.get("_target_"))
    if not target.startswith(_OUR_ADAPTERS) or any(isinstance(value, Mapping) for value in node.values()):
        reason = f"{folder / CONFIG_FILE} names {target} as its adapter, and a folder may not choose the code that runs"
        raise ConfigError(f"start_from={folder}", reason, "start_from=<a folder written by a run>")
    if read_adapter(node) is None:
        return None
    return {"modules_to_save": []} | node | {"pretrained": None}  # none in the config of an older run
