"""Values of a run as words, and tables of them: escaped HTML. No Lightning."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from callbacks.axis import value_label


def words(value: Any) -> str:
    """One value as a person reads it; None is `unknown`."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return value_label(value)
    if isinstance(value, list):  # `8 x NVIDIA H100`, not eight times its name
        counts = Counter(map(str, value)).items()
        return ", ".join(f"{count} x {word}" if count > 1 else word for word, count in counts)
    return str(value)


def flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested objects as one level, with dots in the names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def facts(title: str, values: dict[str, Any]) -> str:
    """Names and values, a row each; what is nested stands in one row."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_fact(value))}</td></tr>"
        for name, value in values.items()
        if value not in ([], {})
    )
    return section(title, f"<table>{rows}</table>") if rows else ""


def _fact(value: Any) -> str:
    if not isinstance(value, dict):
        return words(value)
    return ", ".join(f"{name} {words(inner)}" for name, inner in flat(value))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a heading row; cells are escaped already. Columns after the first are figures."""
    first, *others = heads
    line = f"<th>{escape(first)}</th>" + "".join(f"<th>{escape(one)}</th>" for one in others)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="figures"><thead><tr>{line}</tr></thead><tbody>{body}</tbody></table>'


def section(title: str, content: str, *, id_: str = "") -> str:
    """A card under a heading; nothing where there is nothing to show."""
    place = f' id="{id_}"' if id_ else ""
    return (
        f'<section{place}><h2>{escape(title)}</h2><div class="card">{content}</div></section>'
        if content
        else ""
    )


def folded(title: str, content: str, *, id_: str = "") -> str:
    """A card that opens on request."""
    place = f' id="{id_}"' if id_ else ""
    return (
        f"<details{place}><summary>{escape(title)}</summary>"
        f'<div class="card">{content}</div></details>'
    )
