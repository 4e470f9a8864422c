"""What W&B knows of the steps before a resume: nothing is told twice, and what a kill has taken is told again."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.logger.csv import METRICS_FILE
from recipes.logger.wandb_file import STEP, Row, rows_in_file

_OF_CLOCKS = ("time/", "throughput/", "memory/")  # differ whenever a step is made again


class Told:
    """The rows that W&B has; it cannot erase any.

    Args:
        folder: Of the run.
        run_id: In W&B.
        resumed_at: Optimizer steps completed.
    """

    def __init__(self, folder: Path, run_id: str, *, resumed_at: int) -> None:
        rows = rows_in_file(folder / "wandb", run_id)
        self._folder = folder
        self._resumed_at = resumed_at
        self._newest: int | None = None if rows is None else max([0, *rows])
        self._made_again = {step: row for step, row in (rows or {}).items() if step > resumed_at}

    def at_the_server(self, newest: int) -> None:
        """Of what lies on this disk, only so many steps have reached the server."""
        self._newest = newest
        self._made_again = {step: row for step, row in self._made_again.items() if step <= newest}

    def tell_missed(self, run: Any) -> None:
        """Rows of metrics.csv that never came to W&B."""
        path = self._folder / METRICS_FILE
        if self._newest is None or self._newest >= self._resumed_at or not path.is_file():
            return
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                if self._newest < step <= self._resumed_at:
                    run.log(
                        {STEP: step} | {name: float(text) for name, text in row.items() if text}
                    )

    def new_in(self, row: Row) -> Row:
        """What is to be told of a row: all, or nothing where its numbers are known, or the columns that are new."""
        told = self._made_again.pop(row[STEP], None)
        if told is None or any(told[name] != row[name] for name in _numbers(row, told)):
            return row
        new = {name: value for name, value in row.items() if name not in told}
        return {STEP: row[STEP]} | new if new else {}


def _numbers(row: Mapping[str, object], told: Mapping[str, object]) -> set[str]:
    """Those of a step that are the same however often it is made."""
    return {name for name in row if name in told and not name.startswith(_OF_CLOCKS)}
