"""What the columns of a table say about each row: its class, its labels, or values, as one tensor for all rows.

Shapes: N rows, V labels or values.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from recipes.errors import ConfigError
from recipes.files import count

TargetKind = Literal["classes", "labels", "values"]
_MAX_CLASSES = 1 << 20  # more are numbers of something else


@dataclass(frozen=True, kw_only=True)
class TargetColumns:
    """Columns of targets.

    Attributes:
        names: One column; or several of `values`, or of `labels` that are 0 or 1 each.
        kind: What they are.
        separator: Between the labels in a text; None: labels are lists.
    """

    setting: ClassVar[str] = "data.targets"

    names: Sequence[str]
    kind: TargetKind
    separator: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "classes" and len(self.names) != 1:
            fix = "data.target_kind=labels or values, or data.targets=<one column>"
            raise ConfigError(f"data.targets={[*self.names]}", "a class is in one column", fix)

    @classmethod
    def of(cls, targets: str | Sequence[str], kind: TargetKind, separator: str | None = None) -> "TargetColumns":
        """Return the columns that `data.targets` names."""
        return cls(names=[targets] if isinstance(targets, str) else [*targets], kind=kind, separator=separator)

    def pick(self, fields: dict[str, Any], place: str) -> list[Any]:
        """Return the cells of a row.

        Raises:
            ConfigError: A column is missing, or has nothing in this row.
        """
        for name in self.names:
            if name not in fields:
                known = ", ".join(map(str, fields)) or "nothing"
                raise ConfigError(f"{self.setting}={name}", f"{place} has {known}", f"{self.setting}=<one of them>")
            is_blank = isinstance(fields[name], str) and not fields[name].strip() and self.kind != "labels"
            if fields[name] is None or fields[name] != fields[name] or is_blank:
                reason = f"it has no {name}, and what is learned of a row must be there"
                raise ConfigError(place, reason, f"the rows without those that have no {name}")
        return [fields[name] for name in self.names]

    def read(
        self, cells: Sequence[Sequence[Any]], places: Sequence[str], known: list[str] | None
    ) -> tuple[Tensor, list[str] | None]:
        """Return the targets of all rows, and the names of the classes or labels.

        Whole numbers from 0 are classes or labels by number, which are also their names; anything else is a name.

        Args:
            cells: N times what `pick` returns.
            places: N, for errors.
            known: Names of training; None: these rows are those of training.

        Returns:
            [N] int64 of classes, [N, V] float of labels and values; names, None for values.

        Raises:
            ConfigError: A cell is not what the kind says.
        """
        if self.kind == "values" or (self.kind == "labels" and len(self.names) > 1):
            numbers = [
                [self._to_number(cell, name, place) for name, cell in zip(self.names, row, strict=True)]
                for row, place in zip(cells, places, strict=True)
            ]
            return torch.tensor(numbers, dtype=torch.float32), None if self.kind == "values" else [*self.names]
        lists = [self._to_list(row[0], place) for row, place in zip(cells, places, strict=True)]
        names = _name_classes(lists) if known is None else known
        number_of = {name: number for number, name in enumerate(names)}
        for of_row, place in zip(lists, places, strict=True):
            if unknown := [name for name in of_row if name not in number_of]:
                reason = f"its {self.names[0]} is {unknown[0]!r}, which no row of training has"
                raise ConfigError(place, reason, "rows of that class in training, too, or without it here")
        if self.kind == "classes":
            return torch.tensor([number_of[name] for [name] in lists], dtype=torch.int64), names
        labels = torch.zeros(len(lists), len(names))  # [N, V]
        for place_of_row, of_row in enumerate(lists):
            labels[place_of_row, [number_of[name] for name in of_row]] = 1.0
        return labels, names

    def _to_list(self, cell: Any, place: str) -> list[str]:
        """Return the names in a cell, of which a class has one."""
        if self.kind == "classes":
            if isinstance(cell, list | dict) or (isinstance(cell, float) and not cell.is_integer()):
                shown = json.dumps(cell, default=str)[:60]
                reason = f"its {self.names[0]} is {shown}, and a class is one name or number"
                fix = "data.target_kind=labels" if isinstance(cell, list) else "data.target_kind=values"
                raise ConfigError(place, reason, fix)
            return [_to_name(cell)]
        if isinstance(cell, str) and self.separator is not None:
            return [part.strip() for part in cell.split(self.separator) if part.strip()]
        if isinstance(cell, list):
            return [_to_name(each) for each in cell]
        reason = f"its {self.names[0]} is {json.dumps(cell, default=str)[:60]}, and not a list of labels"
        raise ConfigError(place, reason, "'data.separator=\",\"' for a text of several, or data.target_kind=classes")

    def _to_number(self, cell: Any, name: str, place: str) -> float:
        try:
            number = float(cell)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            reason = f"its {name} is {json.dumps(cell, default=str)[:60]}, which is no finite number"
            fix = "data.target_kind=classes" if self.kind == "values" else "0 or 1 there"
            raise ConfigError(place, reason, fix)
        if self.kind == "labels" and not 0 <= number <= 1:
            raise ConfigError(place, f"its {name} is {number:g}, and a label is 0 or 1", "data.target_kind=values")
        return number


def _to_name(cell: Any) -> str:
    """Return the name of a class: of a number its digits, as a CSV writes it, of true and false those of 1 and 0."""
    if isinstance(cell, bool | float):
        return str(int(cell))
    return str(cell).strip()


def _name_classes(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the names of all classes by number."""
    found = {name for names in lists for name in names}
    if not found or not all(name.isascii() and name.isdecimal() and str(int(name)) == name for name in found):
        return sorted(found)
    largest = max(map(int, found))
    if largest >= _MAX_CLASSES:
        reason = f"the largest class is {largest:,}, of {count(len(found), 'class', 'classes')} in all"
        raise ConfigError("data.targets", reason, "classes from 0 on, names, or data.target_kind=values")
    return [str(number) for number in range(largest + 1)]
