"""Kill runs at random moments, resume them with the same command, and compare them with runs never killed.

    python tests/kill/kill_runs.py --kills 200 [--seed 1] [--out results.json]

Most starts fork one process that has already imported everything; some are the real `python train.py …`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[1:3]]

from kill.cases import CASES, compose, get_overrides  # noqa: E402
from kill.killer import Killer, Result  # noqa: E402
from kill.lives import Zygote  # noqa: E402
from support import ROOT, write_texts  # noqa: E402

# one kill in this many hits the real command instead of a fork
KILLS_PER_COMMAND = 12
HEADER = (
    "case",
    "kills",
    "in a save",
    "by command",
    "lives",
    "lost",
    "bit-equal",
    "recovery s",
    "max",
    "total s",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="over all cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--out", type=Path, help="a JSON file of every kill")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/kills.json")
    parser.add_argument("--folder", type=Path, help="where the runs go; default: a new one")
    options = parser.parse_args()
    names = options.case or list(CASES)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="kill_runs_"))).resolve()
    os.environ["RECIPES_CACHE"] = str(folder / "cache")
    print(f"{options.kills} kills, seed {options.seed}, in {folder}", flush=True)
    results = run_kills(names, options.kills, folder, seed=options.seed)
    print(table(results))
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=2, default=str) + "\n")
    if options.record:
        sys.path.append(str(ROOT / "benchmarks"))
        from measure import report

        typed = f"python tests/kill/kill_runs.py --record --kills {options.kills} --seed {options.seed}"
        report("kills", [record_row(result) for result in results], command=typed)
    for failure in (text for result in results for text in [*result.lost, *result.broken]):
        print(f"\n{failure}", file=sys.stderr)
    return int(any(result.lost or result.broken for result in results))


def run_kills(names: Sequence[str], num_kills: int, folder: Path, *, seed: int) -> list[Result]:
    """Run the kills, divided evenly over the cases."""
    texts = write_texts(folder / "texts")
    zygote = Zygote([compose(get_overrides(name, folder, texts)) for name in names])
    killer = Killer(folder, zygote, seed=seed)
    results = []
    try:
        for index, name in enumerate(names):
            case_kills = num_kills // len(names) + (index < num_kills % len(names))
            num_by_command = case_kills // KILLS_PER_COMMAND
            results.append(killer.kill(name, case_kills, num_by_command=num_by_command))
            print(line(row(results[-1])), flush=True)
    finally:
        zygote.close()
    return results


def row(result: Result) -> list[str]:
    seconds = result.recovery_seconds
    deaths = [death for victim in result.victims for death in victim.deaths]
    return [
        result.name,
        str(result.num_kills),
        str(result.num_kills_in_saves),
        str(sum(death.by_command for death in deaths)),
        str(sum(victim.num_lives for victim in result.victims)),
        str(len(result.lost)),
        f"{result.num_finished} of {len(result.victims)}",
        f"{statistics.median(seconds):.2f}" if seconds else "",
        f"{max(seconds):.2f}" if seconds else "",
        f"{result.seconds:.0f}",
    ]


def record_row(result: Result) -> dict[str, object]:
    """Return a case as the documentation shows it."""
    seconds = result.recovery_seconds
    return {
        "case": result.name,
        "kills": result.num_kills,
        "in a save": result.num_kills_in_saves,
        "checkpoints lost": len(result.lost),
        "runs equal to the last bit": f"{result.num_finished} of {len(result.victims)}",
        "seconds from restart to training, median": round(statistics.median(seconds), 2) if seconds else None,
        "longest": round(max(seconds), 2) if seconds else None,
    }


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per case."""
    rows = [line(row(result)) for result in results]
    return "\n".join([line(HEADER), line(["---"] * len(HEADER)), *rows])


if __name__ == "__main__":
    sys.exit(main())
