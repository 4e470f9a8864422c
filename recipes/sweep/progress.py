"""How far a job has come, from the rows that its run writes. Reads what is new: microseconds a row."""

import csv
import os
import time
from pathlib import Path

from recipes.run_folder import METRICS_FILE


class Progress:
    """Follows `metrics.csv` of a run that may be in another process, on another machine, or not there yet.

    Args:
        folder: Of the run.
        max_steps: Optimizer steps of the whole run; None: not known.

    Attributes:
        step: Optimizer steps completed.
        last: The newest value of each metric.
    """

    def __init__(self, folder: Path, max_steps: int | None) -> None:
        self.step = 0
        self.last: dict[str, float] = {}
        self._path = folder / METRICS_FILE
        self._max_steps = max_steps
        self._began: tuple[float, int] | None = None  # when the first step was seen, and which
        self._file: tuple[int, bytes] | None = None  # what was read, by inode and columns
        self._offset = 0
        self._columns: list[str] = []

    def read(self) -> list[dict[str, float]]:
        """The rows since the last call; all where the file has been written anew, as for a new column."""
        try:
            with self._path.open("rb") as file:
                # of the file that is open: by now the path may name another one
                status = os.fstat(file.fileno())
                header, is_shorter = file.readline(), status.st_size < self._offset
                if (status.st_ino, header) != self._file or is_shorter:
                    self._file = (status.st_ino, header)
                    self._columns = next(csv.reader([header.decode()]), [])
                    self._offset = len(header)
                file.seek(self._offset)
                lines = file.readlines()
        except FileNotFoundError:
            return []
        whole = [line for line in lines if line.endswith(b"\n")]  # the last one may be half written
        rows: list[dict[str, float]] = []
        for line in whole:
            if (row := self._row(line)) is None:
                break  # being written: it is read again
            rows.append(row)
        # the newest row is written again while its step lasts
        self._offset += sum(map(len, whole[: max(0, len(rows) - 1)]))
        for row in rows:
            self.last |= row
        if rows:
            self._move_to(int(rows[-1]["step"]))
        return rows

    def seconds_left(self) -> float | None:
        """By the steps so far, as far as it has been watched; None: too early to say."""
        if self._began is None or self._max_steps is None:
            return None
        at, step = self._began
        if self.step <= step:
            return None
        each = (time.monotonic() - at) / (self.step - step)
        return each * max(0, self._max_steps - self.step)

    @property
    def max_steps(self) -> int | None:
        return self._max_steps

    def _row(self, line: bytes) -> dict[str, float] | None:
        """None: it is a mixture of what it was and what it will be."""
        try:
            cells = next(csv.reader([line.decode()]))
            pairs = zip(self._columns, cells, strict=False)
            row = {name: float(cell) for name, cell in pairs if cell}
        except (ValueError, csv.Error, StopIteration):
            return None
        return row if "step" in row else None

    def _move_to(self, step: int) -> None:
        if self._began is None or step < self.step:  # it has resumed, or gone back
            self._began = (time.monotonic(), step)
        self.step = step
