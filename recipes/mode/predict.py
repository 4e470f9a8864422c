"""Write what a checkpoint predicts for each sample of a split, one row per sample, as JSON lines or CSV."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from torch import Tensor

from recipes.build import Run
from recipes.config.traits import declare_mode
from recipes.data.datamodule import StreamDataModule
from recipes.engine import get_engine
from recipes.errors import ConfigError
from recipes.files import count, replacing
from recipes.loss import NO_PREDICTIONS, SAY_PREDICTIONS
from recipes.mode import own_module
from recipes.mode.evaluate import Weights, hold_out_other_data
from recipes.mode.load import load_task
from recipes.run_folder import claim_output
from recipes.runtime.console import LOGGER
from recipes.task.base import TrainingTask

_SUFFIXES = (".jsonl", ".csv")
Split = Literal["train", "val", "test", "predict"]
Row = dict[str, Any]


@declare_mode(needs_checkpoint=True, reads_data=True, takes_own_training=True)
def predict(run: Run, *, split: Split | None, path: str | None, weights: Weights) -> int:
    """Write a row per sample, in the order of the data: what the loss reads of the outputs, and the loss.

    The columns are `sample`, the index in the split; `class`, `class_name` where the data named them, and
    `probabilities`, `labels` and `probabilities`, or `values`; and of samples with targets `target` and `loss`. Of
    tokens, the loss alone is written, the mean over those of the sample; a reward model writes `chosen_reward`,
    `rejected_reward` and the loss of each pair. What is unknown or not finite is null, but for an unknown class, -100.

    Args:
        run: A run with a checkpoint.
        split: Split of the data; None: the new samples of `data.predict` or the `predict_dataloader` of one's own,
            where there are any, else val.
        path: File to write, `.jsonl` or `.csv`; None: `predictions_<split>.jsonl` in the run folder.
        weights: `trained`, or `ema` for their moving average.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: There is no checkpoint, no average in it or no such split, nothing says what the outputs are of
            samples without targets, or the file cannot be written.
    """
    if split is None and isinstance(run.data, StreamDataModule):
        split = "predict" if run.data.has_new_samples else "val"
    name = split or "predict"
    target = str(run.folder / f"predictions_{name}.jsonl") if path is None else path
    suffix = Path(target).suffix
    if suffix not in _SUFFIXES:
        reason = f"the format follows from the end of the name, {' or '.join(_SUFFIXES)}"
        raise ConfigError(f"mode.path={path}", reason, f"mode.path={target.removesuffix(suffix)}.jsonl")
    file = claim_output(target, "mode.path", is_file=True, replaces=_is_own)
    if run.has_own_training:
        _predict_own(run, split, file)
        return 0
    assert split is not None, "own loaders alone have another default"
    task, checkpoint = load_task(run, weights)
    if split == "val":
        hold_out_other_data(run)
    run.data.trainer = run.trainer
    run.data.prepare_split(split, alone=True)
    num_samples = len(run.data.get_split(split))
    LOGGER.info(f"predicting {count(num_samples, 'sample')} of {split} with {checkpoint}")
    [loader] = run.data.split_dataloaders(split, alone=True)
    with replacing(file) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as text:
        table, num_written = _Table(text, is_csv=suffix == ".csv"), 0
        for row in _predict(run, task, loader):
            table.write(row)
            num_written += 1
    assert num_written == num_samples, f"{num_written} rows of {num_samples} samples"
    run.data.log_skipped()
    LOGGER.info(f"Predictions of {checkpoint} for {count(num_samples, 'sample')} of {split}: {file}")
    return 0


def _predict_own(run: Run, split: Split | None, file: Path) -> None:
    num_written = 0
    with replacing(file) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as text:
        table = _Table(text, is_csv=file.suffix == ".csv")

        def write(columns: own_module.Columns) -> None:
            nonlocal num_written
            for row in _transpose(columns):
                table.write({"sample": num_written} | row)
                num_written += 1

        read, checkpoint = own_module.predict(run, split, write)
    LOGGER.info(f"Predictions of {checkpoint} for {count(num_written, 'sample')} of {read}: {file}")


class _Table:
    """Writes rows as JSON lines, or as CSV with the columns of the first row."""

    def __init__(self, file: TextIO, *, is_csv: bool) -> None:
        self._file = file
        self._is_csv = is_csv
        self._csv: Any = None

    def write(self, row: Row) -> None:
        if not self._is_csv:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            return
        cells = dict(_flatten(row))
        if self._csv is None:
            self._csv = csv.DictWriter(self._file, list(cells), lineterminator="\n")
            self._csv.writeheader()
        self._csv.writerow(cells)


def _predict(run: Run, task: TrainingTask, loader: Iterable[Any]) -> Iterator[Row]:
    """Yield the row of each sample, in the order of the split."""
    engine, plugin = get_engine(run.trainer), run.trainer.precision_plugin

    def read() -> Iterator[Any]:
        return (engine.batch_to_device(plugin.convert_input(batch)) for batch in loader)

    with torch.inference_mode(), plugin.forward_context():
        task.before_split(read())
    number = 0
    for batch in read():
        with torch.inference_mode(), plugin.forward_context():
            predictions = task.predictions(batch)
        if number == 0 and predictions.keys() == {"target", "loss"}:
            LOGGER.info(f"Only target and loss are written: of the loss, {NO_PREDICTIONS}; type {SAY_PREDICTIONS}")
        for values in _list_rows(predictions):
            yield {"sample": number} | dict(_name_class(values, run.data.class_names))
            number += 1


def _name_class(row: Row, names: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield the cells of a row, with the name of a predicted class after its number."""
    for column, value in row.items():
        yield column, value
        if column == "class" and names is not None and isinstance(value, int):
            yield "class_name", names[value] if value < len(names) else None


def _list_rows(predictions: dict[str, Tensor]) -> Iterator[Row]:
    """Yield the values of each sample of a batch, from tensors [B, …]; those that are not finite as None."""
    return _transpose({name: value.detach().cpu().tolist() for name, value in predictions.items()})


def _transpose(columns: Mapping[str, list[Any]]) -> Iterator[Row]:
    """Yield rows of columns."""
    for values in zip(*columns.values(), strict=True):
        yield {name: _without_nan(value) for name, value in zip(columns, values, strict=True)}


def _without_nan(value: Any) -> Any:
    """Return a value of JSON, which has no NaN and no infinity."""
    if isinstance(value, list):
        return [_without_nan(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flatten(row: Row) -> Iterator[tuple[str, Any]]:
    """Yield the cells of a row; a list of K numbers has K columns, `probabilities_0`."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from _flatten({f"{name}_{place}": child for place, child in enumerate(value)})
        else:
            yield name, value


def _is_own(text: str) -> bool:
    """Return whether the text of a file may be replaced: it begins as predictions do."""
    return text.startswith(('{"sample": 0, ', "sample,"))
