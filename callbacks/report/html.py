"""Render pages from templates: one self-contained file each, everything escaped. No Lightning."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..files import write_atomically
from ..progress.text import clock_text
from .charts.figures import Figure
from .charts.series import value_label

_FOLDER = Path(__file__).parent


def render(
    template: str, *, figures: Sequence[Figure] = (), page: Mapping[str, Any] | None = None, **values: Any
) -> str:
    """Return a page with its styles, data and scripts inlined.

    Args:
        template: File name in `templates/`.
        figures: All charts of the page; each gets its index in the script's data.
        page: What else the script needs, see `assets/charts.js`.
        values: What the template shows. Text is escaped unless it is `Markup`.
    """
    for index, figure in enumerate(figures):
        figure.index = index
    data = {**(page or {}), "charts": [figure.data for figure in figures]}
    return _get_environment().get_template(template).render(data=data if figures or page else None, **values)


@cache
def _get_environment() -> Environment:
    environment = Environment(
        keep_trailing_newline=True,
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.globals["asset"] = _read_asset
    environment.filters |= {
        "value": value_text,
        "anchor": anchor_id,
        "link": quoted_link,
        "bytes": size_text,
    }
    return environment


def _read_asset(name: str) -> Markup:
    """Return a file of `assets/`, which goes into the page as it is."""
    return Markup((_FOLDER / "assets" / name).read_text(encoding="utf-8"))


def write_page(path: Path, text: str) -> None:
    """Write a file atomically: a reader finds either the old page or the new one."""
    # half of a surrogate pair, in a text from a run's files, has no bytes in UTF-8
    write_atomically(path, text.encode("utf-8", "backslashreplace").decode())


def write_mode_page(
    path: Path,
    template: str,
    title: str,
    *,
    about: Mapping[str, Any],
    pills: Mapping[str, str] | None = None,
    **values: Any,
) -> None:
    """Write the page of a mode, whose header distinguishes it from others.

    Args:
        path: File to write.
        template: File name in `templates/`, which extends `mode.jinja`.
        title: What the page is.
        about: `name`, `time` in Unix seconds, `devices`, `hostname`, and of the command `program` and `overrides`; any
            may be missing.
        pills: Style class by text of each status.
        values: As of `render`.

    Raises:
        OSError: The file cannot be written.
    """
    facts = [time_text(about["time"])] if "time" in about else []
    facts += [value_text(about[key]) for key in ("devices", "hostname") if about.get(key)]
    named = f"{title}: {about['name']}" if about.get("name") else title
    values |= {"overrides": about.get("overrides", ()), "program": about.get("program", "python train.py")}
    write_page(path, render(template, title=named, facts=facts, pills=pills or {}, **values))


def quoted_link(path: str) -> str:
    """Return a relative path as a quoted link: unquoted, a folder `javascript:…` would run code, `a#b` be cut off."""
    return quote(path.encode("utf-8", "surrogateescape"))


def anchor_id(title: str) -> str:
    """Return the HTML id of a section."""
    return "charts-" + "".join(c if c.isascii() and c.isalnum() else "-" for c in title.lower())


def value_text(value: Any) -> str:
    """Return a value as human-readable text; None becomes `unknown`, a nested object its leaves."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return value_label(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {value_text(inner)}" for name, inner in flatten(value))
    if isinstance(value, list):  # `8 x NVIDIA H100` instead of the name eight times
        counts = Counter(map(str, value)).items()
        return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts)
    return str(value)


def measure_text(value: float, measure: str) -> str:
    """Return a summary value as human-readable text."""
    if measure == "seconds":
        return clock_text(value)
    if measure == "mfu":
        return f"{value:.1%}"
    return f"{value:.3g}" if measure == "peak_memory_gib" else value_text(value)


def time_text(seconds: float) -> str:
    """Return Unix seconds as a date; as a number if there is no such date."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return value_text(seconds)


def size_text(num_bytes: int) -> str:
    """Return a number of bytes with its unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"


def flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the leaves of nested objects with dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
