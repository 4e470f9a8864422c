"""Resume checkpoints of every strategy under every other strategy, on any number of ranks.

Ten steps, a checkpoint, then ten steps under another strategy; the table lists the largest relative loss difference
from an uninterrupted run on one device.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import report

os.environ["LONG_TESTS"] = "1"  # twenty steps
sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("parity", "")]

from cases import NUM_STEPS, STRATEGIES, case, largest_difference  # noqa: E402
from ranks import run_on_ranks  # noqa: E402

HALF = NUM_STEPS // 2
WRITERS = {
    1: ["single"],
    2: ["ddp", "fsdp", "ZeRO-1", "ZeRO-2", "ZeRO-3"],
    4: ["hsdp"],
}
READERS = {
    1: ["single"],
    2: ["ddp", "fsdp", "ZeRO-1", "ZeRO-2", "ZeRO-2, offload", "ZeRO-3"],
    4: ["ddp", "fsdp", "hsdp", "ZeRO-2", "ZeRO-3"],
}


def _case(name: str, world_size: int, *more: str) -> dict[str, Any]:
    base = case(
        "gpt2",
        strategy=STRATEGIES[name],
        precision="32-true",
        accumulate=2,
        world_size=world_size,
    )
    overrides = [word for word in base["overrides"] if not word.startswith("save_every")]
    return base | {"overrides": [*overrides, f"save_every={HALF}", *more]}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="resume_"))
    written: dict[str, Any] = {}
    checkpoints: dict[str, str] = {}
    for ranks, names in WRITERS.items():
        cases = {f"{name}, {ranks}": _case(name, ranks) for name in names}
        where = folder / f"written_{ranks}"
        written |= run_on_ranks(cases, world_size=ranks, folder=where, timeout_seconds=900.0)
        checkpoints |= {
            key: f"{where}/results.json.{number}/checkpoints/step_{HALF:07d}.ckpt" for number, key in enumerate(cases)
        }
    reference = written["single, 1"]["rows"]
    rows = [{"written by": key} for key in checkpoints]
    for ranks, names in READERS.items():
        cases = {
            f"{key} -> {name}, {ranks}": _case(name, ranks, f"resume={checkpoints[key]}")
            for name in names
            for key in checkpoints
        }
        where = folder / f"read_{ranks}"
        results = run_on_ranks(cases, world_size=ranks, folder=where, timeout_seconds=1800.0)
        for row in rows:
            for name in names:
                result = results[f"{row['written by']} -> {name}, {ranks}"]
                assert "error" not in result, result["error"]
                row[f"{name}, {ranks}"] = _cell(result["rows"], reference, written, row, name, ranks)
    report("resume", rows)


def _cell(
    rows: list[dict[str, float]],
    reference: list[dict[str, float]],
    written: dict[str, Any],
    row: dict[str, str],
    name: str,
    ranks: int,
) -> str:
    """Return `same bits` if resuming under the same strategy is exact, else the difference from one device."""
    assert [row["train/samples"] for row in rows] == [row["train/samples"] for row in reference[HALF:]]
    if row["written by"] == f"{name}, {ranks}":
        own = written[row["written by"]]["rows"][HALF:]
        if all(
            resumed[key] == uninterrupted[key]
            for resumed, uninterrupted in zip(rows, own, strict=True)
            for key in ("train/loss", "grad/norm")
        ):
            return "same bits"
    return f"{largest_difference(rows, reference[HALF:])['train/loss']:.1e}"


if __name__ == "__main__":
    main()
