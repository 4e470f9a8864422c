"""Check everything that needs a GPU on the first machine that has one: no network, 10 minutes (15 on two GPUs).

python benchmarks/gpu_check.py                            every check; `make gpu-check`
python benchmarks/gpu_check.py --throughput               tokens/s of recipes instead; `make bench-gpu`
python benchmarks/gpu_check.py --only mfu --only parity   some of them
python benchmarks/gpu_check.py --tiny --accelerator cpu   the same code on a CPU, in seconds; nothing is recorded
python benchmarks/gpu_check.py --table                    the tables of all GPUs measured so far

Each check runs in a separate process; failures are recorded and the others continue. Exit code 1: a check failed.
"""

import argparse
import importlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_checks.check import Check, Outcome, Settings, Skip  # noqa: E402
from gpu_checks.isolate import LEFT_OUT, OUTCOME_FILE, hide_paths, run_checks  # noqa: E402
from gpu_checks.plan import CHECKS, MACHINE, THROUGHPUT  # noqa: E402
from gpu_checks.record import (  # noqa: E402
    RESULTS,
    describe_rows,
    get_result_file,
    make_tables,
    write_docs,
    write_section,
)

from recipes.errors import ConfigError  # noqa: E402
from recipes.runtime.exit_codes import ExitCode  # noqa: E402
from recipes.runtime.world import num_gpus  # noqa: E402

_MINUTES, _MINUTES_OF_TWO = 10.0, 15.0
_NAME_WIDTH = max(len(check.name) for check in (*CHECKS, *THROUGHPUT))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, write their results, and return the exit code."""
    args = _parse(arguments)
    if args.table:
        print(make_tables(args.results or RESULTS))
        return ExitCode.FINISHED
    settings = Settings(
        accelerator=args.accelerator,
        is_tiny=args.tiny,
        num_gpus=args.num_gpus if args.num_gpus is not None else num_gpus(),
        memory_gib=args.memory_gib,
        folder=args.folder or Path(tempfile.mkdtemp(prefix="gpu_check_")),
    )
    if args.one is not None:
        return _run_one(args.one, settings)
    if settings.accelerator == "gpu" and not settings.num_gpus:
        print(
            ConfigError("--accelerator gpu", "torch sees no GPU on this machine", "--tiny --accelerator cpu"),
            file=sys.stderr,
        )
        return ExitCode.INVALID_CONFIG
    minutes = args.minutes or (_MINUTES if settings.num_gpus < 2 else _MINUTES_OF_TWO)
    return _run_all(args, settings, total_seconds=settings.limit(60 * minutes))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models; speeds are reported, not judged")
    parser.add_argument("--throughput", action="store_true", help="measure tokens/s of recipes instead")
    parser.add_argument("--only", action="append", help="a check by name; may be repeated")
    parser.add_argument("--minutes", type=float, help="of all checks together")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    parser.add_argument("--table", action="store_true", help="print the tables of all GPUs and exit")
    # passed to the process that runs a single check
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--num-gpus", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory-gib", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.typed = sys.argv[1:] if arguments is None else list(arguments)
    return args


def _run_all(args: argparse.Namespace, settings: Settings, *, total_seconds: float) -> int:
    """Run the selected checks, print each outcome, and record them."""
    plan = THROUGHPUT if args.throughput else CHECKS
    wanted = args.only or [check.name for check in plan]
    if unknown := [name for name in wanted if name not in {check.name for check in plan}]:
        known = ", ".join(check.name for check in plan)
        print(ConfigError(f"--only {unknown[0]}", "there is no such check", f"one of {known}"), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    chosen = [check for check in plan if check.name in wanted]
    [(_, machine), *_] = run_checks([MACHINE], settings, total_seconds=total_seconds, command=_get_command)
    if machine.verdict != "pass":
        print(f"this machine cannot be described: {machine.note}", file=sys.stderr)
        return ExitCode.CRASHED
    total_seconds -= machine.seconds
    gpus = machine.figures["gpus"]
    settings = replace(settings, memory_gib=gpus[0]["memory_gib"] if gpus else None)
    outcomes: list[tuple[Check, Outcome]] = []
    for check, outcome in run_checks(chosen, settings, total_seconds=total_seconds, command=_get_command):
        outcomes.append((check, outcome))
        _print(check, outcome)
    failed = [check.name for check, outcome in outcomes if outcome.verdict == "fail"]
    left_out = [check.name for check, outcome in outcomes if outcome.note.startswith(LEFT_OUT)]
    if failed:
        print(f"{len(failed)} of {len(outcomes)} failed: {', '.join(failed)}; their logs are in {settings.folder}")
    if left_out:
        print(f"{LEFT_OUT}: {', '.join(left_out)}; --minutes gives them time, --only runs them alone")
    _record(args, settings, machine.figures, outcomes)
    return ExitCode.CRASHED if failed else ExitCode.FINISHED


def _get_command(check: Check, settings: Settings) -> list[str]:
    """Return the command that runs one check in a separate process."""
    command = [sys.executable, str(Path(__file__)), "--one", check.name, "--folder", str(settings.folder)]
    command += ["--accelerator", settings.accelerator, "--num-gpus", str(settings.num_gpus)]
    command += ["--tiny"] if settings.is_tiny else []
    return command + (["--memory-gib", str(settings.memory_gib)] if settings.memory_gib is not None else [])


def _run_one(name: str, settings: Settings) -> int:
    """Run one check in this process and write its outcome; an exception ends this process with a traceback."""
    [check] = [check for check in (MACHINE, *CHECKS, *THROUGHPUT) if check.name == name]
    module, _, function = check.function.partition(":")
    run: Any = getattr(importlib.import_module(f"gpu_checks.{module}"), function)
    try:
        outcome: Outcome = run(settings, **check.arguments)
    except Skip as skip:
        outcome = Outcome(verdict="skipped", note=str(skip))
    text = hide_paths(outcome.to_json(), settings.folder)
    (settings.folder / OUTCOME_FILE).write_text(text)
    return ExitCode.FINISHED


def _print(check: Check, outcome: Outcome) -> None:
    print(
        f"{check.name:<{_NAME_WIDTH}}  {outcome.verdict:<7}  {outcome.seconds:5.0f} s  {outcome.headline}", flush=True
    )
    for line in outcome.note.splitlines():
        print(f"{'':<{_NAME_WIDTH}}  {line}", flush=True)


def _record(
    args: argparse.Namespace, settings: Settings, machine: dict[str, Any], outcomes: Sequence[tuple[Check, Outcome]]
) -> None:
    """Write the result file; only full-size GPU results go into benchmarks/results/ and the tables in the docs."""
    is_measurement = settings.accelerator == "gpu" and not settings.is_tiny
    folder = args.results or (RESULTS if is_measurement else None)
    if folder is None:
        return
    device = machine["gpus"][0]["name"] if settings.accelerator == "gpu" else machine["cpu"] or "cpu"
    path = get_result_file(folder, accelerator=settings.accelerator, device=device, num_gpus=settings.num_gpus)
    section = "throughput" if args.throughput else "checks"
    typed = " ".join(["python benchmarks/gpu_check.py", *args.typed])
    content = {"command": typed, "date": date.today().isoformat(), "machine": machine}
    content["rows"] = describe_rows(outcomes)
    write_section(path, section, content, device=device, num_gpus=settings.num_gpus)
    print(f"written to {hide_paths(str(path), settings.folder)}")
    if folder == RESULTS:
        write_docs()


if __name__ == "__main__":
    sys.exit(main())
