"""Planned against measured: peak bytes of tensors on a rank during a step, for real runs on CPU ranks.

`python benchmarks/plan_accuracy.py` measures eager runs, `… compiled` compiled ones, `… <name> …` single runs.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import report

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("parity", "")]

from plan_cases import CASES, COMPILED, PEAK_RANKS, cpu_cluster, get_overrides  # noqa: E402
from ranks import run_on_ranks  # noqa: E402
from support import composed_config, resolved  # noqa: E402

from recipes.plan.plan import make_plan  # noqa: E402

MIB = 2**20


def main() -> None:
    typed = sys.argv[1:]
    files = {"plan_accuracy": [*CASES], "plan_compiled": [*COMPILED]}
    file = {(): "plan_accuracy", ("compiled",): "plan_compiled"}.get(tuple(typed))
    names = typed if file is None else files[file]
    cases = CASES | COMPILED
    rows: list[dict[str, Any]] = []
    for num_ranks in (1, 2):
        chosen = {name: {"overrides": get_overrides(name)} for name in names if cases[name][0] == num_ranks}
        folder = Path(tempfile.mkdtemp(prefix="plan_accuracy_"))
        results = run_on_ranks(chosen, world_size=num_ranks, folder=folder, timeout_seconds=1800, worker=PEAK_RANKS)
        for name, result in results.items():
            assert "error" not in result, f"{name}: {result['error']}"
            plan = make_plan(resolved(composed_config(*get_overrides(name))), cpu_cluster(num_ranks), rates=None)
            planned, measured = plan.peak.total, result["peak_bytes"]
            rows.append(
                {
                    "run": name,
                    "ranks": num_ranks,
                    "planned_mib": round(planned / MIB, 1),
                    "measured_mib": round(measured / MIB, 1),
                    "error_percent": round(100 * (planned / measured - 1), 2) + 0.0,  # no -0.0
                }
            )
    errors = [abs(row["error_percent"]) for row in rows]
    print(f"median error {statistics.median(errors):.2f} %, worst {max(errors):.2f} %, of {len(rows)} runs")
    if file is not None:
        report(file, rows)
    else:
        print(*rows, sep="\n")


if __name__ == "__main__":
    main()
