"""Show what some captions and images of a validation find: the nearest, and which are their own. No Lightning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .classes import is_png
from .html import value_text
from .run_record import is_finite

_LONGEST = 200  # letters of a caption


@dataclass(frozen=True, kw_only=True)
class Item:
    """An image or a caption.

    Attributes:
        png: The image in base64; empty: it is a caption.
        text: The caption; empty: it is an image.
        cosine: Of its features and those of the query, as text; empty: it is the query.
        is_own: Whether it belongs to the query.
    """

    png: str
    text: str
    cosine: str
    is_own: bool


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a caption or an image finds.

    Attributes:
        item: The caption or the image.
        note: At which rank the nearest of its own is.
        found: The nearest images or captions, the nearest first.
    """

    item: Item
    note: str
    found: list[Item]


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """What the page shows of a split.

    Attributes:
        title: Heading.
        note: What was compared.
        captions: What some captions find.
        images: What some images find.
    """

    title: str
    note: str
    captions: list[Query]
    images: list[Query]


def read_retrieved(record: Mapping[str, Any]) -> Retrieved | None:
    """Return what to show of a `retrieval_<split>.json`; None if it is empty.

    Raises:
        ValueError: It has another form.
    """
    num_images, num_captions = (record.get(f"num_{name}") for name in ("images", "captions"))
    if num_images is None and num_captions is None:
        return None
    step = record.get("step")
    when = f" at step {value_text(step)}" if is_finite(step) else ""
    compared = f"{value_text(num_images)} images with {value_text(num_captions)} captions"
    return Retrieved(
        title=f"Retrieval of {record.get('split')}",
        note=f"{compared}{when}: the nearest of some that are spread evenly, with their cosine",
        captions=_read_queries(record.get("captions"), "images", num_images),
        images=_read_queries(record.get("images"), "captions", num_captions),
    )


def _read_queries(queries: Any, name: str, total: Any) -> list[Query]:
    """Return what captions, or images, found; `name` is what."""
    shown = []
    for query in queries if isinstance(queries, list) else ():
        found = query.get(name) if isinstance(query, dict) else None
        if not isinstance(found, list) or not is_finite(query.get("rank")):
            raise ValueError(f"{str(query)[:60]} is not a query with its rank and {name}")
        note = f"own at rank {value_text(query['rank'])} of {value_text(total)}"
        shown.append(Query(item=_read_item(query), note=note, found=_read_items(found)))
    return shown


def _read_items(found: Sequence[Any]) -> list[Item]:
    return [_read_item(each) for each in found]


def _read_item(item: Any) -> Item:
    png, text = (item.get("pixels"), item.get("text")) if isinstance(item, dict) else (None, None)
    image, shown = str(png) if is_png(png) else "", text if isinstance(text, str) else ""
    if not (image or isinstance(text, str)):
        raise ValueError(f"{str(item)[:60]} is neither an image nor a caption")
    cosine = item.get("cosine")
    return Item(
        png=image,
        text=shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…",
        cosine=f"{cosine:.3f}" if is_finite(cosine) else "",
        is_own=item.get("is_own") is True,
    )
