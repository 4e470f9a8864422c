"""The tests/parity experiment on this accelerator: many runs in one process group, each with its own engine."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PARITY = ROOT / "tests" / "parity"
sys.path[:0] = [str(PARITY), str(ROOT / "tests")]

from cases import STRATEGIES, case, packed_case  # noqa: E402, F401
from ranks import WORKER, run_on_ranks  # noqa: E402
from test_policy import make_case as _make_policy_case  # noqa: E402
from test_preferences import make_case as _make_preference_case  # noqa: E402

from gpu_checks.check import Settings  # noqa: E402

_LIMIT_SECONDS = 180.0  # time limit for one process group

Rows = list[dict[str, float]]


def make_case(
    settings: Settings, name: str, *more: str, world_size: int = 1, accumulate: int = 2, model: str = "gpt2"
) -> dict[str, Any]:
    """Return the case for an engine.

    Args:
        settings: Settings of the check.
        name: Name of the engine, as in tests/parity/cases.py.
        more: Additional overrides.
        world_size: Number of ranks.
        accumulate: Number of micro-batches per rank and step.
        model: Name of the model, as in tests/parity/cases.py.
    """
    known = case(model, strategy=STRATEGIES[name], precision="32-true", accumulate=accumulate, world_size=world_size)
    return known | {"overrides": [*known["overrides"], f"trainer.accelerator={settings.accelerator}", *more]}


def preference_case(settings: Settings, loss: str, engine: str, *more: str) -> dict[str, Any]:
    """Return the case for a loss of tests/parity/test_preferences.py and an engine, eager."""
    files = settings.folder / ("pairs_" + "_".join([loss, engine, *more]).translate(str.maketrans(" ,.=", "____")))
    known = _make_preference_case(loss, engine, files, accumulate=2, world_size=1)
    where = ["compile=false", f"trainer.accelerator={settings.accelerator}", *more]
    return known | {"overrides": [*known["overrides"], *where]}


def policy_case(settings: Settings, kind: str, engine: str) -> dict[str, Any]:
    """Return the case for a kind of tests/parity/test_policy.py and an engine, eager."""
    known = _make_policy_case(kind, engine, settings.folder / "prompts", accumulate=2, world_size=1)
    where = ["compile=false", f"trainer.accelerator={settings.accelerator}"]
    return known | {"overrides": [*known["overrides"], *where]}


def run_cases(
    settings: Settings, name: str, cases: Mapping[str, Any], *, world_size: int = 1, worker: Path = WORKER
) -> dict[str, dict[str, Any]]:
    """Run cases in one process group; return their results by name.

    Args:
        settings: Settings of the check.
        name: Name of the output folder.
        cases: Cases from `make_case`, by name.
        world_size: Number of ranks.
        worker: Script that runs the cases as one rank.

    Raises:
        RuntimeError: A case failed; the other cases ran.
    """
    folder, timeout_seconds = settings.folder / name, settings.limit(_LIMIT_SECONDS)
    results = run_on_ranks(
        dict(cases), world_size=world_size, folder=folder, timeout_seconds=timeout_seconds, worker=worker
    )
    errors = {key: found["error"] for key, found in results.items() if "error" in found}
    if errors:
        last_lines = [f"{key}: {error.strip().splitlines()[-1]}" for key, error in errors.items()]
        raise RuntimeError("\n".join([*errors.values(), *last_lines]))
    return results


def run_curves(settings: Settings, name: str, cases: Mapping[str, Any], *, world_size: int = 1) -> dict[str, Rows]:
    """Run cases in one process group; return the metric rows of each case."""
    results = run_cases(settings, name, cases, world_size=world_size)
    return {key: found["rows"] for key, found in results.items()}


def only_installed(names: Sequence[str]) -> list[str]:
    """Return the engines in a list that are installed."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    return [name for name in names if has_deepspeed or not name.startswith("ZeRO")]


def describe_missing(names: Sequence[str]) -> str:
    """Name the engines in a list that are not installed; empty if all are."""
    missing = [name for name in names if name not in only_installed(names)]
    return f"without {', '.join(missing)}: DeepSpeed is not installed" if missing else ""
