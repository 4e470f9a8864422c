"""Format Markdown tables."""

from collections.abc import Mapping, Sequence


def make_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows with identical keys as a table that ends with a newline."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([escape(row[column]) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def escape(value: object) -> str:
    """Format a value as a cell: escape `|`, which would end the cell, and `<` outside code, which would start a tag."""
    if value is None:
        return ""
    parts = str(value).replace("|", "\\|").replace("\n", " ").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))
