"""Result file of a GPU, and tables generated from all result files. Does not import torch."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_checks.check import Check, Outcome
from gpu_checks.plan import CHECKS, THROUGHPUT

RESULTS = Path(__file__).parents[1] / "results"
DOCS = Path(__file__).parents[2] / "docs/measurements/gpus.md"
BEGIN, END = "<!-- gpu tables: begin -->", "<!-- gpu tables: end -->"
SECTIONS: dict[str, tuple[str, tuple[Check, ...]]] = {
    "checks": ("make gpu-check", CHECKS),
    "throughput": ("make bench-gpu", THROUGHPUT),
}


def get_result_file(folder: Path, *, accelerator: str, device: str, num_gpus: int) -> Path:
    """Return a device's result file, such as `gpu_nvidia_h100_80gb_hbm3.json`, with `_x2` for two GPUs."""
    slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return folder / f"{accelerator}_{slug}{f'_x{num_gpus}' if num_gpus > 1 else ''}.json"


def write_section(path: Path, section: str, content: dict[str, Any], *, device: str, num_gpus: int) -> None:
    """Write one command's results into a device's file, keeping those of the other command.

    Args:
        path: Path from `get_result_file`.
        section: `checks` or `throughput`.
        content: The command, its date, and `rows` by name.
        device: Name of the device.
        num_gpus: Number of GPUs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record = json.loads(path.read_text()) if path.is_file() else {}
    record |= {"device": device, "num_gpus": num_gpus, section: content}
    path.write_text(json.dumps(record, indent=2) + "\n")


def describe_rows(outcomes: Sequence[tuple[Check, Outcome]]) -> dict[str, Any]:
    """Return the outcomes by name, in the format of the result file."""
    return {check.name: json.loads(outcome.to_json()) for check, outcome in outcomes}


def make_tables(folder: Path = RESULTS) -> str:
    """Return the check and throughput tables: a column per GPU measured, and no other figures."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu_*.json"))]
    return "\n\n".join(_make_table(section, records) for section in SECTIONS)


def _make_table(section: str, records: Sequence[dict[str, Any]]) -> str:
    command, checks = SECTIONS[section]
    measured = [record for record in records if section in record]
    names = [_describe_device(record, section) for record in measured] or ["no GPU has been measured yet"]
    head = ["passes if" if section == "checks" else "`python train.py` with", *names]
    lines = [f"| `{command}` | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for check in checks:
        what = check.passes_if if section == "checks" else f"`{check.passes_if}`"
        cells = [_describe_cell(record[section]["rows"], check.name) for record in measured] or [""]
        lines.append(f"| {check.name} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _describe_device(record: dict[str, Any], section: str) -> str:
    count = f"{record['num_gpus']} x " if record["num_gpus"] > 1 else ""
    return f"{count}{record['device']}, {record[section]['date']}"


def _describe_cell(rows: dict[str, Any], name: str) -> str:
    """Return `pass: figures`, `fail: figures` or `skipped: reason`; empty if the check was not run."""
    if name not in rows:
        return ""
    row = rows[name]
    text = row["note"] if row["verdict"] == "skipped" else row["headline"]
    return f"{row['verdict']}: {text}" if text else str(row["verdict"])


def write_docs(docs: Path = DOCS, folder: Path = RESULTS) -> None:
    """Write the tables between the markers in a document.

    Raises:
        ValueError: The document has no markers.
    """
    text = docs.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{docs.name} has no lines {BEGIN!r} and {END!r}: the tables go between them; add both")
    docs.write_text(f"{head}{BEGIN}\n{make_tables(folder)}\n{END}{tail}")
