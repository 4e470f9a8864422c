"""Tables and figures of measurements: all come from benchmarks/results/, a table with its command, machine and date."""

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.generator.table import make_table

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

_BLOCK = re.compile(r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end of table -->", re.DOTALL)
_FIGURE = re.compile(r"<!-- figure: (?P<name>[^>]+?) -->.*?<!-- end -->")
# result keys that are names in code -> column heading
_HEADINGS = {
    "saving": "saving",
    "saves": "saves",
    "stall_seconds": "training waits, s",
    "until_proven_seconds": "until verified, s",
    "added_seconds": "total overhead, s",
    "tokens_per_second_while_writing": "relative tokens/s while writing",
    "first_save_added_seconds": "overhead of the first save, s",
    "step_seconds": "step, s",
    "checkpoint_gib": "checkpoint, GiB",
    "extra_host_gib": "extra host memory, GiB",
    "hash_seconds": "hashing, s",
    "arithmetic_bytes_per_parameter": "bytes per parameter, arithmetic",
    "measured_bytes_per_parameter": "measured",
    "planned_mib": "planned, MiB",
    "measured_mib": "measured, MiB",
    "planned_milliseconds": "planned, ms",
    "measured_milliseconds": "measured, ms",
    "error_percent": "error, %",
    "ms_per_step": "step, ms",
}
_PACKAGES = ("torch", "lightning", "deepspeed")


def fill_tables(text: str) -> str:
    """Return a page with every `<!-- table: name -->`, from `benchmarks/results/name.json`, and figure filled in."""
    text = _BLOCK.sub(lambda found: _make_block(found["name"]), text)
    return _FIGURE.sub(lambda found: f"<!-- figure: {found['name']} -->{FIGURES[found['name']]()}<!-- end -->", text)


def _read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def _cell(name: str, row: str, column: str) -> str:
    """Return the value in the row of a result whose first column has this text."""
    [found] = [each for each in _read(name)["rows"] if row in str(next(iter(each.values())))]
    return str(found[column])


def _plan_errors() -> list[float]:
    return [abs(row["error_percent"]) for row in _read("plan_accuracy")["rows"]]


def _gain_by_packing() -> str:
    packed, padded = (
        int(_cell("fine_tuning", row, "tokens/s, padding excluded").replace(",", ""))
        for row in ("recipe (packed rows)", "one example per row")
    )
    return f"{packed / padded:.1f}"


# figures in sentences: `<!-- figure: name -->value<!-- end -->` in a page becomes the value of today's result
FIGURES: dict[str, Callable[[], str]] = {
    "config error, s": lambda: _cell("start", "a config error", "median, s"),
    "first step, s": lambda: _cell("start", "first optimizer step", "median, s"),
    "overhead of a 2 ms step, ms": lambda: _cell("step_overhead", "step of 2 ms", "median of the differences, ms"),
    "gain by packing": _gain_by_packing,
    "kills": lambda: str(sum(row["kills"] for row in _read("kills")["rows"])),
    "planned runs": lambda: str(len(_plan_errors())),
    "median error of a plan, %": lambda: f"{statistics.median(_plan_errors()):.2f}",
    "worst error of a plan, %": lambda: f"{max(_plan_errors()):.1f}",
}


def _make_block(name: str) -> str:
    record = _read(name)
    rows = [{_HEADINGS.get(key, key): _show(value) for key, value in row.items()} for row in record["rows"]]
    return f"<!-- table: {name} -->\n{make_table(rows)}\n{_describe(record)}\n<!-- end of table -->"


def _describe(record: dict[str, Any]) -> str:
    """Return the sentence that describes how a table was measured."""
    versions = ", ".join(f"{name} {record['packages'][name]}" for name in _PACKAGES if name in record["packages"])
    where = f"{', '.join(record['devices'])} with {record['num_cpus']} cores"
    return f"`{record['command']}`, {record['date']}, on {where}; Python {record['python']}, {versions}."


def _show(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)
