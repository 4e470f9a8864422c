"""Run each group of cases once, in one process group; tests read the results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import run_on_ranks

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_group(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs a group of cases on N ranks, once per session, and returns the results by name."""
    done: dict[str, dict[str, Any]] = {}

    def run(name: str, cases: dict[str, Any], *, world_size: int) -> dict[str, Any]:
        if name not in done:
            folder: Path = tmp_path_factory.mktemp("group")
            done[name] = run_on_ranks(cases, world_size=world_size, folder=folder)
        return done[name]

    return run


@pytest.fixture
def rows(run_group: Run) -> Callable[..., list[dict[str, float]]]:
    """Return a function that returns the rows of one case in a group, or fails with the case's traceback."""

    def find_rows(group: str, cases: dict[str, Any], name: str, *, world_size: int) -> list[dict[str, float]]:
        result = run_group(group, cases, world_size=world_size)[name]
        assert "error" not in result, result["error"]
        found: list[dict[str, float]] = result["rows"]
        return found

    return find_rows
