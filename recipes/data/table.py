"""Rows of numbers: columns of a table as inputs and targets, in memory: `data=table`.

Shapes: N rows, F inputs, V labels or values.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data.read_rows import check_split, open_rows
from recipes.data.targets import TargetColumns, TargetKind
from recipes.errors import ConfigError, type_setting
from recipes.files import count
from recipes.foreign_file import reading
from recipes.home import expand_home
from recipes.tokenizer import Tokenizer

_ARRAYS = ".npz"
_NUM_NAMED = 8  # columns that an error names
_FAR = 5.0  # deviations of a mean from 0, or the deviation: then a model takes long to learn these numbers


class Table:
    """Rows whose inputs are all numbers.

    Args:
        path: CSV, JSONL, JSON, Parquet or Arrow: a file, a folder or a glob; `hf://` and the id of a hub dataset; or a
            .npz file of arrays, whose arrays [N] are columns and arrays [N, k] are k columns, `x_0` to `x_<k - 1>`.
        inputs: Columns of the inputs; None: all that are not targets.
        targets: Column of the targets, or several of them; an array [N, k] by its name.
        target_kind: What they are: `classes`, by name or number; `labels`, several per row; or `values`.
        separator: Between the labels in a text; None: they are lists.
        standardize: Subtract the mean of each input and divide by its deviation, both of the training rows.
        on_missing: What an empty input is: an `error`, or the `mean` of its column in the training rows.
        val_path: Rows for validation, as in `path`; None: a part of `path`.
        val_fraction: That part, chosen by a hash of the row.
        split: Split of a hub dataset.

    Raises:
        ConfigError: The settings contradict each other.
    """

    sample_kind: ClassVar[str] = "tensors"
    target_kind: ClassVar[str] = "{target_kind}"
    tokenizer: ClassVar[Tokenizer | None] = None  # the samples are not text

    def __init__(
        self,
        *,
        path: str,
        inputs: Sequence[str] | None,
        targets: str | Sequence[str],
        target_kind: TargetKind,
        separator: str | None,
        standardize: bool,
        on_missing: Literal["error", "mean"],
        val_path: str | None,
        val_fraction: Annotated[float, "> 0, < 1"],
        split: str,
    ) -> None:
        self._paths = {"data.path": path} | ({} if val_path is None else {"data.val_path": val_path})
        check_split(split, self._paths)
        self._split = split
        self._inputs = None if inputs is None else [*inputs]
        self._columns = TargetColumns.of(targets, target_kind, separator)
        self._standardize = standardize
        self._takes_missing = on_missing == "mean"
        self._val_fraction = val_fraction
        self._recorded: Mapping[str, Any] | None = None
        self._holds_out_all = False

    def prepare(self) -> None:
        """Read all rows; a second call does nothing.

        Raises:
            ConfigError: A cell is no number, a column is missing, or there are too few rows.
        """
        if hasattr(self, "_parts"):
            return
        training = self._read("data.path", None)
        if "data.val_path" in self._paths:
            held_out = self._read("data.val_path", training)
        elif self._holds_out_all:
            held_out = training
        else:
            training, held_out = _divide(training, self._val_fraction)
        self._parts = {"train": training, "val": held_out}
        if self._recorded is None:
            self._scaling = Scaling.of(training, standardizes=self._standardize)
        else:
            self._scaling = Scaling.recorded(self._recorded, training.names)

    def hold_out_all(self) -> None:
        """Validate on all rows of `path`, where they have no others for it; before `prepare`."""
        self._holds_out_all = True

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes or labels, by number; None: the targets are values. After `prepare`."""
        return self._parts["train"].class_names

    @property
    def statistics(self) -> dict[str, Any]:
        """Names of the inputs, and what is subtracted from each and divides it, for the checkpoint."""
        return {
            "inputs": self._parts["train"].names,
            "mean": self._scaling.mean.tolist(),
            "std": self._scaling.std.tolist(),
            "filled": self._scaling.filled.tolist(),
        }

    def use_statistics(self, recorded: Mapping[str, Any]) -> None:
        """Scale the inputs as in the run that a checkpoint is of, whose rows may have been others.

        Raises:
            ConfigError: Its inputs are other columns.
        """
        self._recorded = recorded
        if hasattr(self, "_parts"):
            self._scaling = Scaling.recorded(recorded, self._parts["train"].names)

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal training rows and scaling; after `prepare`."""
        return f"{self._parts['train'].fingerprint}/{self._scaling.fingerprint}"

    @property
    def val_fingerprint(self) -> str:
        """String that is equal for equal validation rows and scaling; after `prepare`."""
        return f"{self._parts['val'].fingerprint}/{self._scaling.fingerprint}"

    @property
    def transform(self) -> str:
        """What is done to an input, for whoever uses an exported model."""
        return f"(x - mean) / std of {self.statistics}"

    def describe(self) -> str:
        """Return the numbers of rows, inputs and targets."""
        train, val = self._parts["train"], self._parts["val"]
        if train.class_names is None:
            what = _describe_values(train.targets)
        elif train.targets.ndim == 2:
            what = count(len(train.class_names), "label")
        else:
            of_each = Counter(train.targets.tolist()).values()
            what = f"{len(train.class_names)} classes of {min(of_each):,} to {max(of_each):,} in training"
        missing = int(torch.isnan(train.inputs).sum() + torch.isnan(val.inputs).sum())
        filled = f"; {count(missing, 'empty cell')} read as the mean of the column" if missing else ""
        return (
            f"{len(train):,} training and {len(val):,} validation rows of {count(len(train.names), 'input')}; {what}"
            f"{filled}"
        )

    def count_classes(self) -> dict[str, int]:
        """Return the training rows of each class or label by its name; empty for values."""
        rows = self._parts["train"]
        if rows.class_names is None:
            return {}
        numbers = rows.targets
        of_each = numbers.sum(dim=0) if numbers.ndim == 2 else torch.bincount(numbers, minlength=len(rows.class_names))
        return dict(zip(rows.class_names, of_each.int().tolist(), strict=True))

    def train(self) -> "TableRows":
        """Return the training samples."""
        return TableRows(self._parts["train"], self._scaling)

    def val(self) -> "TableRows":
        """Return the validation samples."""
        return TableRows(self._parts["val"], self._scaling)

    def _read(self, setting: str, training: "_Rows | None") -> "_Rows":
        """Return the rows of a path, with the columns of training where they are known."""
        path = self._paths[setting]
        names, cells, targets, places = self._list_cells(path, setting, training)
        if not places:
            raise ConfigError(f"{setting}={path}", "it has no rows", f"{setting}=<a table with rows>")
        inputs = torch.tensor(cells, dtype=torch.float64)  # [N, F]; a time in seconds loses minutes in float32
        if not self._takes_missing and (empty := torch.isnan(inputs).nonzero()).numel():
            row, column = empty[0].tolist()
            num_rows = int(torch.isnan(inputs).any(dim=1).sum())
            reason = f"it has no {names[column]}, as {count(num_rows, 'row')} of {len(places):,} have an empty cell"
            fix = "data.on_missing=mean for the mean of the column, or the rows without those"
            raise ConfigError(f"{path} {places[row]}", reason, fix)
        found, class_names = self._columns.read(targets, places, None if training is None else training.class_names)
        return _Rows(inputs=inputs, targets=found, names=names, class_names=class_names)

    def _list_cells(
        self, path: str, setting: str, training: "_Rows | None"
    ) -> tuple[list[str], NDArray[np.float64] | list[list[float]], list[list[Any]], list[str]]:
        """Return the names of the inputs; inputs [N, F], NaN where one is empty; cells of targets; and places."""
        if path.lower().endswith(_ARRAYS):
            rows: Any = _read_arrays(path, setting)
            self._columns = _spread(self._columns, rows[0][1] if rows else {})
        else:
            rows = ((row.place, row.parse()) for row in open_rows(path, setting=setting, split=self._split))
        wanted = self._inputs if training is None else training.names
        names: list[str] = []
        cells, targets, places = [], [], []
        for place, fields in rows:
            targets.append(self._columns.pick(fields, place))
            if not names:
                names = wanted or [name for name in fields if name not in self._columns.names]
                if not names:
                    reason = "it has no column but the targets"
                    raise ConfigError(f"{setting}={path}", reason, f"{setting}=<a table with inputs>")
                self._check_names(names, fields, place)
            cells.append([_to_number(name, fields, names, place) for name in names])
            places.append(place)
        return names, cells, targets, places

    def _check_names(self, names: Sequence[str], fields: Mapping[str, Any], place: str) -> None:
        if missing := [name for name in names if name not in fields]:
            known = ", ".join([*fields][:_NUM_NAMED])
            raise ConfigError(f"data.inputs={missing[0]}", f"{place} has {known}", "data.inputs=[<some of them>]")
        if both := [name for name in names if name in self._columns.names]:
            fix = type_setting("data.inputs", [name for name in names if name not in both])
            raise ConfigError(f"data.inputs={both[0]}", "it is what is learned, data.targets", fix)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of a split.

    Attributes:
        inputs: [N, F] float64, NaN where a cell is empty.
        targets: [N] int64, or [N, V] float.
        names: F, of the inputs.
        class_names: Of classes and labels.
    """

    inputs: Tensor
    targets: Tensor
    names: list[str]
    class_names: list[str] | None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def fingerprint(self) -> str:
        found = hashlib.blake2b(digest_size=8)
        found.update(self.inputs.numpy().tobytes() + self.targets.numpy().tobytes())
        found.update("\0".join([*self.names, *(self.class_names or ())]).encode())
        return f"table/{len(self)}/{found.hexdigest()}"


@dataclass(frozen=True)
class Scaling:
    """Mean and deviation of the inputs of training, [F] float64 each; 0 and 1: inputs are used as they are.

    Attributes:
        mean: What is subtracted.
        std: What divides.
        filled: What stands for an empty cell, before that.
    """

    mean: Tensor
    std: Tensor
    filled: Tensor

    @classmethod
    def of(cls, rows: _Rows, *, standardizes: bool) -> "Scaling":
        """Measure the inputs in float64; a constant one is divided by 1.

        Raises:
            ConfigError: A column has nothing in any row.
        """
        inputs = rows.inputs
        if (empty := torch.isnan(inputs).all(dim=0)).any():
            name = rows.names[int(empty.nonzero()[0])]
            fix = type_setting("data.inputs", [each for each in rows.names if each != name][:_NUM_NAMED])
            raise ConfigError(f"data.inputs={name}", "it is empty in every row of training", fix)
        mean = inputs.nanmean(dim=0)
        std = (inputs - mean).square().nanmean(dim=0).sqrt()
        std = torch.where(std > 0, std, 1.0)
        return cls(mean, std, mean) if standardizes else cls(torch.zeros_like(mean), torch.ones_like(mean), mean)

    @classmethod
    def recorded(cls, statistics: Mapping[str, Any], names: Sequence[str]) -> "Scaling":
        """Return the scaling of a checkpoint.

        Raises:
            ConfigError: It is of other columns.
        """
        if [*statistics["inputs"]] != [*names]:
            reason = f"the inputs are {', '.join(names[:_NUM_NAMED])}, and the run was trained on others"
            fix = type_setting("data.inputs", [*statistics["inputs"]])
            raise ConfigError("data", reason, fix)
        return cls(*(torch.tensor(statistics[name], dtype=torch.float64) for name in ("mean", "std", "filled")))

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal numbers."""
        numbers = torch.cat([self.mean, self.std, self.filled]).numpy().tobytes()
        return hashlib.blake2b(numbers, digest_size=6).hexdigest()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return a row as the model reads it: [F] float64 -> [F] float32."""
        return ((torch.where(torch.isnan(inputs), self.filled, inputs) - self.mean) / self.std).float()


class TableRows(Dataset[dict[str, Tensor]]):
    """Rows by index."""

    tokens_per_sample: int = 0

    def __init__(self, rows: _Rows, scaling: Scaling) -> None:
        self._rows = rows
        self._scaling = scaling
        self.targets_per_sample: int | None = 1 if rows.targets.ndim == 1 else rows.targets.shape[1]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample: inputs [F] float, targets [] int64 or [V] float."""
        return {"inputs": self._scaling(self._rows.inputs[index]), "targets": self._rows.targets[index]}


def _describe_values(values: Tensor) -> str:
    """Return the number of values [N, V] per row, and what a model would learn more easily than they are."""
    center, scale = float(values.double().mean()), float(values.double().std(correction=0))
    said = f"{count(values.shape[1], 'value')} of mean {center:.4g} and deviation {scale:.4g}"
    is_far = scale > 0 and (abs(center) > _FAR * scale or not 1 / _FAR < scale < _FAR)
    return f"{said}, learned faster with loss.center={center:.4g} loss.scale={scale:.4g}" if is_far else said


def _divide(rows: _Rows, fraction: float) -> tuple[_Rows, _Rows]:
    """Divide by a hash of the cells: equal rows are in one part, and each stays there when others come or go."""
    limit = int(fraction * 2**32)
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=4).digest() for row in rows.inputs.numpy())
    is_val = torch.tensor([int.from_bytes(each, "big") < limit for each in hashes])  # [N]
    if is_val.all() or not is_val.any():
        reason = f"{count(len(rows), 'row')} leave none for {'training' if is_val.all() else 'validation'}"
        raise ConfigError(f"data.val_fraction={fraction}", reason, "data.val_path=<rows for validation>")
    train, val = (replace(rows, inputs=rows.inputs[of], targets=rows.targets[of]) for of in (~is_val, is_val))
    return train, val


def _to_number(name: str, fields: Mapping[str, Any], names: Sequence[str], place: str) -> float:
    """Return the cell of an input as a number, NaN if it is empty.

    Raises:
        ConfigError: It is neither.
    """
    if (cell := fields.get(name)) is None or cell == "":
        return float("nan")
    try:
        number = float(cell)
    except (TypeError, ValueError):
        numeric = [other for other in names if _is_number(fields.get(other))]
        reason = f"its {name} is {str(cell)[:40]!r}, which is no number, and inputs are numbers"
        fix = f"{type_setting('data.inputs', numeric[:_NUM_NAMED])}, or a column of 0 and 1 for each value of {name}"
        raise ConfigError(place, reason, fix) from None
    if number in (float("inf"), float("-inf")):
        raise ConfigError(place, f"its {name} is {cell}", "a finite number there, or an empty cell")
    return number


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _read_arrays(path: str, setting: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of the arrays in a .npz file, by the name of their column.

    Raises:
        ConfigError: The file is damaged, or its arrays are no columns of equal length.
    """
    file = expand_home(path, setting)
    if not Path(file).is_file():
        raise ConfigError(f"{setting}={path}", "there is no such file", f"{setting}=<a .npz file>")
    with reading(file, f"{setting}={path}", f"{setting}=<another copy of the file>"), np.load(file) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    lengths = {name: len(array) if array.ndim in (1, 2) else None for name, array in found.items()}
    if len({*lengths.values()}) != 1 or None in lengths.values():
        shapes = ", ".join(f"{name} {[*array.shape]}" for name, array in found.items())
        reason = f"its arrays are {shapes}, and all should be [N] or [N, k] with one N"
        raise ConfigError(f"{setting}={path}", reason, f"{setting}=<such a file>")
    columns: dict[str, list[Any]] = {}
    for name, array in found.items():
        parts = {name: array} if array.ndim == 1 else {f"{name}_{k}": array[:, k] for k in range(array.shape[1])}
        columns |= {part: values.tolist() for part, values in parts.items()}
    return [
        (f"row {number}", dict(zip(columns, row, strict=True)))
        for number, row in enumerate(zip(*columns.values(), strict=True), start=1)
    ]


def _spread(columns: TargetColumns, fields: Mapping[str, Any]) -> TargetColumns:
    """Return the columns of an array [N, k] that is named as a whole."""
    names: list[str] = []
    for name in columns.names:
        parts = [each for each in fields if each.rpartition("_")[0] == name and each.rpartition("_")[2].isdecimal()]
        names += [name] if name in fields or not parts else parts
    return replace(columns, names=names)
