"""Tables of measurements: every figure comes from benchmarks/results/, with its command, machine and date."""

import json
import re
from pathlib import Path
from typing import Any

from docs.generator.table import make_table

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

_BLOCK = re.compile(r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end of table -->", re.DOTALL)
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
    """Return a page with every `<!-- table: name -->` filled in from `benchmarks/results/name.json`."""
    return _BLOCK.sub(lambda found: _make_block(found["name"]), text)


def _make_block(name: str) -> str:
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
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
