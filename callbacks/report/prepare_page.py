"""Write the page of prepared documents: what each step and rule dropped, with examples. No Lightning."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .html import folded, render_page, section, table, write_page

_WIDTH, _ROW = 760, 26  # width and row height of the chart, in pixels
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
    kept = f"{report['kept']:,} of {report['documents']:,} documents kept, {_size(report['kept_bytes'])}"
    body = f"<h1>Prepared documents</h1><p class='where'>{kept} of {_size(report['bytes'])}</p>"
    body += section("Documents left after each step", _funnel(report))
    if len(report["domains"]) > 1:
        body += section("By kind of document", _domains(report["domains"]))
    body += section("Rules", _rules(report["rules"]))
    body += "".join(_examples(report["rules"]))
    body += section("Largest groups of copies", _copies(report["largest_copies"]))
    body += section("Evaluation sets", _evaluation(report["evaluation"]))
    rows = [[escape(row["place"]), escape(row["reason"])] for row in report["unreadable"]]
    body += section("Rows that could not be read", table(["row", "reason"], rows, css="list") if rows else "")
    settings = [[escape(str(name)), escape(_setting(value))] for name, value in report["settings"].items()]
    body += folded("Settings", table(["setting", "value"], settings, css="list"))
    write_page(path, render_page(title="Prepared documents", body=body, data={}, styles=["page.css"], scripts=[]))


def _funnel(report: Mapping[str, Any]) -> str:
    """Return a chart with a bar for the documents that remain after each step."""
    left, left_bytes = report["documents"], report["bytes"]
    bars = [("were read", left, left_bytes, 0)]
    for reason, title in _STEPS.items():
        if count := report["dropped"].get(reason, 0):
            left, left_bytes = left - count, left_bytes - report["dropped_bytes"][reason]
            bars.append((title, left, left_bytes, count))
    total = max(report["documents"], 1)
    drawn = ""
    for index, (title, count, num_bytes, lost) in enumerate(bars):
        y = index * _ROW
        width = 320 * count / total
        lost_width = 320 * lost / total
        label = f"{count:,}, {_size(num_bytes)}" + (f" (-{lost:,}, {lost / total:.1%})" if lost else "")
        drawn += (
            f'<text x="0" y="{y + 17}">{escape(title)}</text>'
            f'<rect x="170" y="{y + 4}" width="{width:.1f}" height="18" fill="var(--c0)"/>'
            f'<rect x="{170 + width:.1f}" y="{y + 4}" width="{lost_width:.1f}" height="18" fill="var(--c1)"/>'
            f'<text x="500" y="{y + 17}">{label}</text>'
        )
    size = f'viewBox="0 0 {_WIDTH} {len(bars) * _ROW}" width="100%" style="max-width:{_WIDTH}px"'
    style = 'font-size="13" fill="currentColor" font-family="inherit"'
    return f'<svg {size} role="img" aria-label="documents left after each step" {style}>{drawn}</svg>'


def _domains(domains: Mapping[str, Mapping[str, Any]]) -> str:
    reasons = sorted({reason for domain in domains.values() for reason in domain["dropped"]})
    rows = [
        [
            escape(name),
            f"{domain['documents']:,}",
            f"{domain['kept']:,}",
            f"{domain['kept'] / max(domain['documents'], 1):.1%}",
            _size(domain["kept_bytes"]),
            *(f"{domain['dropped'].get(reason, 0):,}" for reason in reasons),
        ]
        for name, domain in domains.items()
    ]
    return table(["kind", "read", "stay", "", "text", *reasons], rows)


def _rules(rules: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            f"<b>{escape(rule['rule'])}</b> {escape(rule['description'])}",
            escape(str(rule["limit"])),
            f"{rule['lines']:,} lines" if "lines" in rule else f"{rule['failed']:,}",
            "" if "lines" in rule else f"{rule['first']:,}",
        ]
        for rule in rules
    ]
    return table(["rule", "limit", "documents that fail it", "and none before it"], rows) if rows else ""


def _examples(rules: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a collapsed card per rule that documents failed, with the first such documents and their values."""
    for rule in rules:
        if examples := rule.get("examples"):
            rows = [
                [escape(example["place"]), f"{example['value']:.4g}", _shown(example["text"])] for example in examples
            ]
            title = f"{rule['rule']}: {rule['failed']:,} documents, the first {len(examples)}"
            yield folded(title, table(["document", "value", "text"], rows, css="list"))


def _copies(groups: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for group in groups:
        similarity = f"from {group['lowest_similarity']:.3f}" if "lowest_similarity" in group else "1"
        least = f"<br><i>least similar:</i> {_shown(group['least_similar'])}" if "least_similar" in group else ""
        rows.append([f"{group['copies']:,}", escape(group["kind"]), similarity, _shown(group["text"]) + least])
    return table(["copies dropped", "kind", "similarity", "what stays"], rows, css="list") if rows else ""


def _evaluation(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    numbers = (
        f"<p>{found['items']:,} items; {found['found']:,} were found in documents,"
        f" {found['found_in_part']:,} only in part; {found['too_short']:,} are too short to search for,"
        f" {found['boilerplate']:,} are boilerplate.</p>"
    )
    rows = [
        [escape(hit["place"]), escape(hit["item"]), f"{hit['coverage']:.0%}", _shown(hit["evidence"])]
        for hit in found["documents"]
    ]
    listed = table(["document dropped", "item", "of it", "longest passage"], rows, css="list") if rows else ""
    return numbers + listed


def _shown(text: str) -> str:
    return f"<code>{escape(' '.join(text.split()))}</code>"


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"


def _setting(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_setting(inner)}" for name, inner in value.items()) or "none"
    return "null" if value is None else str(value)
