"""Read back what a page of a report draws."""

import json
import re
from itertools import accumulate
from typing import Any


def get_data(page: str) -> dict[str, Any]:
    """Return what the page's script draws from."""
    data = re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert data is not None
    value: dict[str, Any] = json.loads(data.group(1))
    return value


def get_points(page: str, metric: str) -> list[tuple[int, float | None]]:
    """Return the points of a metric that a zoom shows."""
    [curve] = [c for chart in get_data(page)["charts"] for c in chart["curves"] if c["name"] == metric]
    return list(zip(accumulate(curve["steps"]), curve["values"], strict=True))
