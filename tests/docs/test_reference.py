"""Pages that are written from the source are up to date, and typed tables name exactly what the code has."""

import ast
import re
from pathlib import Path

import pytest
from support import ROOT

from recipes.runtime.exit_codes import ExitCode

REFERENCE = ROOT / "docs/reference"


def test_every_generated_page_and_table_is_up_to_date() -> None:
    from docs.generator.__main__ import make_pages

    behind = [str(path.relative_to(ROOT)) for path, text in make_pages().items() if path.read_text() != text]
    assert behind == [], "python -m docs.generator"


def _first_column(page: str) -> dict[str, str]:
    """Return the names in the first column of a page's tables, each with the rest of its row."""
    lines = (REFERENCE / page).read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    return {name: "|".join(row[2:]) for row in rows for name in re.findall(r"`([^`]+)`", row[1])}


def _logged_events() -> dict[str, set[str]]:
    """Return the events that the code logs, each with the fields of all places."""
    found: dict[str, set[str]] = {}
    for path in [*ROOT.glob("recipes/**/*.py"), *ROOT.glob("callbacks/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not _is_log_event(node.func):
                continue
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            for event in names:
                found.setdefault(event, set()).update(keyword.arg for keyword in node.keywords if keyword.arg)
    return found


def _is_log_event(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in ("log_event", "_log_event")


def test_the_events_are_those_that_the_code_logs_with_their_fields() -> None:
    documented, logged = _first_column("events.md"), _logged_events()
    assert documented.keys() == logged.keys()
    for event, fields in logged.items():
        assert all(f"`{field}`" in documented[event] for field in fields), (event, fields)


def test_the_exit_codes_are_those_of_the_code() -> None:
    lines = (REFERENCE / "exit_codes.md").read_text().splitlines()
    codes = [int(line.split("|")[1]) for line in lines if re.match(r"\| \d+ \|", line)]
    assert sorted(codes) == sorted(ExitCode)


@pytest.mark.parametrize("line", ["CITATION.cff", "pyproject.toml"])
def test_the_version_is_the_same_everywhere(line: str) -> None:
    [version] = re.findall(r'^version(?:: | = ")([\d.]+)', (ROOT / line).read_text(), re.MULTILINE)
    assert version == re.findall(r'^version = "([\d.]+)"', Path(ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
