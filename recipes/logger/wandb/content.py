"""What a W&B run says beside its rows: names, config, code, tables, summary. Read from the run folder."""

import csv
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from recipes.run_folder import EVENTS_FILE, METRICS_FILE
from recipes.run_folder import SUMMARY_FILE
from recipes.logger.wandb.init import CODE
from recipes.run_folder import SAMPLES_FILE
from recipes.run_folder import read_config, read_environment, read_json_lines, read_cells

FOLDER_OF_SWEEP = "wandb_"  # as recipes.config.compose names it
_MAX_TABLE_ROWS = 2000  # the newest
_MAX_TAG_LETTERS = 64  # W&B refuses longer ones


def get_names(folder: Path, *, group: str | None) -> dict[str, Any]:
    """The name, group and tags of a run: by its recipe, its model and, in a sweep, the sweep."""
    config, environment = read_config(folder), read_environment(folder)
    typed = dict(word.split("=", 1) for word in environment["overrides"] if "=" in word)
    recipe = str(typed["recipe"] if "recipe" in typed else config["name"])
    model = str(typed["model"] if "model" in typed else _name_of(config["model"]))
    kind = f"{recipe}_{model}"
    sweep = _sweep_of(folder)
    where = f"{sweep}_{folder.name}" if sweep is not None else folder.name
    tags = [recipe, model, _name_of(config["strategy"]), *map(str, config["tags"])]
    if sweep is not None:
        tags.append("sweep")
    return {
        "run_name": f"{kind}_{where}",
        "run_group": group or (f"sweep_{sweep}" if sweep is not None else kind),
        "run_job_type": "train",
        "run_tags": tuple(tag[:_MAX_TAG_LETTERS] for tag in dict.fromkeys(tags) if tag),
    }


def logged_config(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved config, and what the run runs on as `environment`.

    As sections: W&B itself joins their names with dots, and asks for none in the names that it is told.

    Args:
        folder: Of the run.
        known: What W&B has. Of a group that its sweep varies it is the option, `model: gpt2_nano`, by which it
            knows the trial; the section stands beside it as `model_settings`.
    """
    told = read_config(folder) | {"environment": read_environment(folder)}
    options = {name for name, value in known.items() if isinstance(value, str)}
    return {
        f"{name}_settings" if name in options and isinstance(value, dict) else name: value
        for name, value in told.items()
    }








def code_diff() -> str:
    """What the code has that its last commit has not; empty outside a repository or without git."""
    try:
        done = subprocess.run(
            ["git", "diff", "HEAD"],
            cwd=CODE,
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.decode(errors="replace")


def events_table(folder: Path) -> Any:
    """Every event of the run, those of the processes before this one among them; None: there is none."""
    return _table(
        folder / EVENTS_FILE,
        ["step", "event", "time", "details"],
        lambda line: [
            line["step"],
            line["event"],
            line["time"],
            json.dumps({k: v for k, v in line.items() if k not in ("step", "event", "time")}),
        ],
    )


def samples_table(folder: Path) -> Any:
    """What the model has written; None: nothing."""
    return _table(
        folder / SAMPLES_FILE,
        ["step", "prompt", "text"],
        lambda line: [line["step"], line["prompt"], line["text"]],
    )


def validation_table(folder: Path) -> Any:
    """A row a validation, all its metrics side by side; None: there was none."""
    import wandb

    rows = read_cells(folder / METRICS_FILE)
    columns = [name for name in rows[0] if name.startswith("val/")] if rows else []
    found = [row for row in rows if any(row[name] for name in columns)][-_MAX_TABLE_ROWS:]
    if not found:
        return None
    data = [
        [int(row["step"]), *(float(row[name]) if row[name] else None for name in columns)]
        for row in found
    ]
    return wandb.Table(columns=["step", *columns], data=data)


def _table(path: Path, columns: list[str], row: Any) -> Any:
    import wandb

    if not path.is_file():
        return None
    lines = read_json_lines(path)[-_MAX_TABLE_ROWS:]
    return wandb.Table(columns=columns, data=[row(line) for line in lines])


def _sweep_of(folder: Path) -> str | None:
    """The name of the sweep that a run is a job of, Hydra's or W&B's: its folder lies in the sweep's."""
    parent = folder.resolve().parent
    if (parent / "multirun.yaml").is_file():
        return parent.name
    is_wandbs = parent.name.startswith(FOLDER_OF_SWEEP)
    return parent.name.removeprefix(FOLDER_OF_SWEEP) if is_wandbs else None


def _name_of(node: Mapping[str, Any]) -> str:
    """The class that an option stands for."""
    return str(node["_target_"]).rpartition(".")[2]
