"""Markdown tables."""

from collections.abc import Mapping, Sequence


def make_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with equal keys as a table; a newline ends it."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([escape(row[column]) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def escape(value: object) -> str:
    """Return a value as a cell: `|` would end it, and `<` outside of code begin a tag."""
    if value is None:
        return ""
    parts = str(value).replace("|", "\\|").replace("\n", " ").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))
