"""Show a classifier's mistakes: the accuracy of each class, which are taken for which, and the worst. No Lightning."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .html import value_text
from .run_record import is_finite

_MOST_IN_MATRIX = 50  # classes
_MOST_ROWS = 50  # of a table
_MOST_NUMBERED = 20  # classes whose matrix shows numbers
_SIDE = 560  # pixels of the matrix's side, at most
_LONGEST = 16  # letters of a name beside it
_LETTER = 6.5  # pixels of a letter
_PNG = re.compile(r"[A-Za-z0-9+/=]+")

Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of the confusion matrix.

    Attributes:
        x: Its left edge, in pixels.
        y: Its upper edge.
        share: Part of the samples of its row's class, from 0 to 1.
        text: The number of samples, where there is room for it.
        title: What it is, in words.
        is_right: Whether it is on the diagonal.
    """

    x: float
    y: float
    share: float
    text: str
    title: str
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Classes:
    """What the page shows of a split.

    Attributes:
        title: Heading.
        note: Number of samples, and accuracy.
        rows: Of the table of classes, the worst first: class, samples, accuracy, and what it is taken for.
        of_rows: How many of how many classes these are; empty: all.
        names: Of the classes of the matrix; empty: they are too many for one.
        cells: Of the matrix.
        cell_size: Pixels of a cell.
        margin: Pixels for the names beside and below the matrix.
        pairs: Most frequent mistakes where there is no matrix: class, prediction, samples, and their part of the class.
        mistakes: PNG in base64 or nothing, the classes and the loss, of those with the largest losses.
    """

    title: str
    note: str
    rows: list[Row]
    of_rows: str
    names: list[str]
    cells: list[Cell]
    cell_size: float
    margin: float
    pairs: list[Row]
    mistakes: list[tuple[str, str, str]]


def read_classes(record: Mapping[str, Any]) -> Classes | None:
    """Return what to show of a `classes_<split>.json`; None if it holds no counts.

    Raises:
        ValueError: It has another form.
    """
    totals, hits = (_read_counts(record, key) for key in ("samples", "right"))
    if not totals:
        return None
    wrong = _read_pairs(record.get("pairs"))
    counts = {**wrong, **{(number, number): count for number, count in hits.items()}}
    if any(count > totals.get(target, 0) for (target, _), count in counts.items()):
        raise ValueError("more predictions of a class than samples are counted")
    given = record.get("class_names")
    numbers = sorted({number for pair in wrong for number in pair} | totals.keys())
    names = {number: _name(number, given) for number in numbers}
    taken_for: dict[int, dict[int, int]] = {number: {} for number in numbers}
    for (target, predicted), count in wrong.items():
        taken_for[target][predicted] = count
    accuracies = {number: hits.get(number, 0) / count for number, count in totals.items()}
    worst = sorted(totals, key=accuracies.__getitem__)
    num_samples, num_right = sum(totals.values()), sum(hits.values())
    step = record.get("step")
    when = f" at step {value_text(step)}" if is_finite(step) else ""
    has_matrix = len(numbers) <= _MOST_IN_MATRIX
    shown = [_cut(names[number]) for number in numbers] if has_matrix else []
    return Classes(
        title=f"Classes of {record.get('split')}",
        note=f"{num_samples:,} samples{when}, {num_right / num_samples:.1%} right",
        rows=[
            (names[each], f"{totals[each]:,}", f"{accuracies[each]:.1%}", _list_wrong(taken_for[each], names))
            for each in worst[:_MOST_ROWS]
        ],
        of_rows=f"the {_MOST_ROWS} worst of {len(worst):,} classes" if len(worst) > _MOST_ROWS else "",
        names=shown,
        cells=_make_cells(numbers, names, counts, totals) if has_matrix else [],
        cell_size=_get_cell_size(len(numbers)),
        margin=12 + _LETTER * max(map(len, shown), default=0),
        pairs=[] if has_matrix else _list_pairs(wrong, names, totals),
        mistakes=_read_mistakes(record.get("mistakes"), given),
    )


def _read_counts(record: Mapping[str, Any], key: str) -> dict[int, int]:
    """Return the counts of those classes that have any."""
    counts = record.get(key)
    if not isinstance(counts, list) or not all(type(each) is int and each >= 0 for each in counts):
        raise ValueError(f"{key} are not the counts of classes")
    return {number: count for number, count in enumerate(counts) if count}


def _read_pairs(pairs: Any) -> dict[tuple[int, int], int]:
    counts = {}
    for row in pairs if isinstance(pairs, list) else ():
        if not (isinstance(row, list) and len(row) == 3 and all(type(each) is int and each >= 0 for each in row)):
            raise ValueError(f"{str(row)[:60]} is not a class, a prediction and a count")
        counts[row[0], row[1]] = row[2]
    return counts


def _name(number: int, names: Any) -> str:
    is_known = isinstance(names, list) and number < len(names)
    return str(names[number]) if is_known else str(number)


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _list_wrong(taken_for: Mapping[int, int], names: Mapping[int, str]) -> str:
    most = sorted(taken_for.items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{names[predicted]} ({count:,})" for predicted, count in most)


def _list_pairs(wrong: Mapping[tuple[int, int], int], names: Mapping[int, str], totals: Mapping[int, int]) -> list[Row]:
    most = sorted(wrong.items(), key=lambda each: -each[1])[:_MOST_ROWS]
    return [
        (names[target], names[predicted], f"{count:,}", f"{count / totals[target]:.1%}")
        for (target, predicted), count in most
    ]


def _get_cell_size(num_classes: int) -> float:
    return min(44.0, _SIDE / num_classes)


def _make_cells(
    numbers: Sequence[int],
    names: Mapping[int, str],
    counts: Mapping[tuple[int, int], int],
    totals: Mapping[int, int],
) -> list[Cell]:
    places, size = {number: place for place, number in enumerate(numbers)}, _get_cell_size(len(numbers))
    return [
        Cell(
            x=places[predicted] * size,
            y=places[target] * size,
            share=count / totals[target],
            text=f"{count:,}" if len(numbers) <= _MOST_NUMBERED else "",
            title=f"{names[target]} taken for {names[predicted]}: {count:,}, {count / totals[target]:.1%} of the class",
            is_right=target == predicted,
        )
        for (target, predicted), count in sorted(counts.items())
    ]


def _read_mistakes(mistakes: Any, names: Any) -> list[tuple[str, str, str]]:
    """Return the image, the classes and the loss of each mistake."""
    found = []
    for each in mistakes if isinstance(mistakes, list) else ():
        numbers: list[Any] = [each.get("target"), each.get("predicted")] if isinstance(each, dict) else []
        if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{str(each)[:60]} is not a mistake with a class and a prediction")
        image = each.get("image")
        target, predicted = (_name(number, names) for number in numbers)
        found.append(
            (image if is_png(image) else "", f"{target} taken for {predicted}", f"loss {value_text(each.get('loss'))}")
        )
    return found


def is_png(image: Any) -> bool:
    """Return whether a value can be an image in base64, and nothing else that a page would read."""
    return isinstance(image, str) and _PNG.fullmatch(image) is not None
