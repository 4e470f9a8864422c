"""Write the page of prepared documents: what each step and rule dropped, with examples. No Lightning."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .html import render, write_page

# reasons for dropping in the order of the steps, with labels for what remains after each
_STEPS = {
    "unreadable": "can be read",
    "empty": "have text",
    "quality": "pass the rules",
    "contaminated": "repeat no evaluation set",
    "exact copy": "equal no earlier one",
    "near copy": "resemble no earlier one",
}


def write_prepare_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: File to write.
        report: Content of `report.json`.

    Raises:
        OSError: The file cannot be written.
    """
    domains = report["domains"]
    page = render(
        "prepare.jinja",
        title="Prepared documents",
        report=report,
        steps=list(_steps_left(report)),
        reasons=sorted({reason for domain in domains.values() for reason in domain["dropped"]}),
        settings={str(name): _setting(value) for name, value in report["settings"].items()},
    )
    write_page(path, page)


def _steps_left(report: Mapping[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """Yield what remains after each step: its label, documents, bytes, and the documents that the step dropped."""
    left, left_bytes = report["documents"], report["bytes"]
    yield "were read", left, left_bytes, 0
    for reason, title in _STEPS.items():
        if count := report["dropped"].get(reason, 0):
            left, left_bytes = left - count, left_bytes - report["dropped_bytes"][reason]
            yield title, left, left_bytes, count


def _setting(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_setting(inner)}" for name, inner in value.items()) or "none"
    return "null" if value is None else str(value)
