"""Names, config, code and tables of a W&B run, read from the run folder."""

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipes.logger.wandb.init import CODE
from recipes.run_folder import (
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    read_cells,
    read_config,
    read_environment,
    read_json_lines,
)

SWEEP_FOLDER_PREFIX = "wandb_"  # set by recipes.config.compose
_MAX_TABLE_ROWS = 2000  # the newest
_MAX_TAG_LENGTH = 64  # W&B rejects longer ones


def get_names(folder: Path, *, group: str | None) -> dict[str, Any]:
    """Return name, group and tags of a run, from its recipe, model and sweep."""
    config, environment = read_config(folder), read_environment(folder)
    overrides = dict(text.split("=", 1) for text in environment["overrides"] if "=" in text)
    recipe = overrides.get("recipe", str(config["name"]))
    model = overrides.get("model", _get_class_name(config["model"]))
    kind = f"{recipe}_{model}"
    sweep = _get_sweep(folder)
    where = f"{sweep}_{folder.name}" if sweep is not None else folder.name
    tags = [recipe, model, _get_class_name(config["strategy"]), *map(str, config["tags"])]
    if sweep is not None:
        tags.append("sweep")
    return {
        "run_name": f"{kind}_{where}",
        "run_group": group or (f"sweep_{sweep}" if sweep is not None else kind),
        "run_job_type": "train",
        "run_tags": tuple(tag[:_MAX_TAG_LENGTH] for tag in dict.fromkeys(tags) if tag),
    }


def get_logged_config(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved, nested config, with the run's environment as `environment`.

    Args:
        folder: The run folder.
        known: The config that W&B already has. In a W&B sweep it holds a varied group as the name of its option
            (`model: gpt2_nano`); the settings of that group are then logged as `model_settings`.
    """
    config = read_config(folder) | {"environment": read_environment(folder)}
    options = {name for name, value in known.items() if isinstance(value, str)}
    return {
        f"{name}_settings" if name in options and isinstance(value, dict) else name: value
        for name, value in config.items()
    }


def get_code_diff() -> str:
    """Return the uncommitted changes of the code; empty outside a repository or without git."""
    try:
        done = subprocess.run(["git", "--no-optional-locks", "diff", "HEAD"], cwd=CODE, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.decode(errors="replace")


def events_table(folder: Path) -> Any:
    """Return a table of all events of the run, earlier processes included; None if there are none."""
    return _table(
        folder / EVENTS_FILE,
        ["step", "event", "time", "details"],
        lambda line: [
            line["step"],
            line["event"],
            line.get("time"),
            json.dumps({k: v for k, v in line.items() if k not in ("step", "event", "time")}),
        ],
    )


def samples_table(folder: Path) -> Any:
    """Return a table of the texts that the model generated; None if there are none."""
    return _table(
        folder / SAMPLES_FILE,
        ["step", "prompt", "text"],
        lambda line: [line["step"], line["prompt"], line["text"]],
    )


def validation_table(folder: Path) -> Any:
    """Return a table with one row per validation and one column per metric; None if there was none."""
    import wandb

    rows = read_cells(folder / METRICS_FILE)
    columns = [name for name in rows[0] if name.startswith("val/")] if rows else []
    validations = [row for row in rows if any(row[name] for name in columns)][-_MAX_TABLE_ROWS:]
    if not validations:
        return None
    data = [[int(row["step"]), *(float(row[name]) if row[name] else None for name in columns)] for row in validations]
    return wandb.Table(columns=["step", *columns], data=data)


def _table(path: Path, columns: list[str], get_row: Callable[[dict[str, Any]], list[Any]]) -> Any:
    import wandb

    if not path.is_file():
        return None
    lines = read_json_lines(path)[-_MAX_TABLE_ROWS:]
    return wandb.Table(columns=columns, data=[get_row(line) for line in lines])


def _get_sweep(folder: Path) -> str | None:
    """Return the name of the Hydra or W&B sweep that contains the run folder; None if there is none."""
    parent = folder.resolve().parent
    if (parent / "multirun.yaml").is_file():
        return parent.name
    is_wandb_sweep = parent.name.startswith(SWEEP_FOLDER_PREFIX)
    return parent.name.removeprefix(SWEEP_FOLDER_PREFIX) if is_wandb_sweep else None


def _get_class_name(node: Mapping[str, Any]) -> str:
    """Return the name of the class that a config node builds."""
    return str(node["_target_"]).rpartition(".")[2]
