"""Bytes per rank for weights, gradients and Adam's optimizer state, measured on CPU ranks and predicted."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import report

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("parity", "")]

from cases import memory_case  # noqa: E402
from held_bytes import bytes_per_parameter  # noqa: E402
from ranks import run_on_ranks  # noqa: E402

GROUPS = {
    1: ["single"],
    2: ["ddp", "fsdp", "ZeRO-1", "ZeRO-2", "ZeRO-3"],
    4: ["fsdp", "hsdp", "ZeRO-3"],
}


def main() -> None:
    rows: list[dict[str, Any]] = []
    for world_size, names in GROUPS.items():
        cases = {name: memory_case(name, world_size=world_size) for name in names}
        folder = Path(tempfile.mkdtemp(prefix="memory_"))
        results = run_on_ranks(cases, world_size=world_size, folder=folder, timeout_seconds=900.0)
        for name, result in results.items():
            assert "error" not in result, f"{name}: {result['error']}"
            row = {"strategy": name, "ranks": world_size}
            row["arithmetic_bytes_per_parameter"] = bytes_per_parameter(name, world_size)
            row["measured_bytes_per_parameter"] = round(result["held_bytes"] / result["num_parameters"], 2)
            rows.append(row | {"parameters": result["num_parameters"]})
    report("memory", rows)


if __name__ == "__main__":
    main()
