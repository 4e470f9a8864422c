"""Read the progress of a job from its `metrics.csv`, incrementally: microseconds per row."""

import csv
import math
import os
import time
from pathlib import Path
from typing import BinaryIO

from recipes.run_folder import METRICS_FILE


class Progress:
    """Follows `metrics.csv` of a run in another process or on another machine; the file may not exist yet.

    Args:
        folder: The run folder.
        max_steps: Optimizer steps of the whole run; None if unknown.

    Attributes:
        step: Optimizer steps completed.
        last: The newest value of each metric.
    """

    def __init__(self, folder: Path, max_steps: int | None) -> None:
        self.step = 0
        self.max_steps = max_steps
        self.last: dict[str, float] = {}
        self._path = folder / METRICS_FILE
        self._start: tuple[float, int] | None = None  # time and number of the first step seen
        self._file: tuple[int, bytes] | None = None  # inode and header of the file read so far
        self._offset = 0  # of the newest row
        self._newest = b""  # its line up to the step
        self._columns: list[str] = []

    def read(self) -> list[dict[str, float]]:
        """Return the rows since the last call; all rows if the file was rewritten, as for a new column."""
        try:
            with self._path.open("rb") as file:
                # of the open file: the path may already name another one
                status = os.fstat(file.fileno())
                header, is_shorter = file.readline(), status.st_size < self._offset
                if (status.st_ino, header) != self._file or is_shorter or not self._is_at_newest(file):
                    self._file = (status.st_ino, header)
                    self._columns = next(csv.reader([header.decode(errors="replace")]), [])
                    self._offset, self._newest = len(header), b""
                file.seek(self._offset)
                lines = file.readlines()
        except FileNotFoundError:
            return []
        complete = [line for line in lines if line.endswith(b"\n")]  # the last may be half written
        rows: list[dict[str, float]] = []
        for line in complete:
            if (row := self._parse(line)) is None:
                break  # being written; read again at the next call
            rows.append(row)
        # the offset stays before the newest row, which is rewritten until its step ends
        if rows:
            self._offset += sum(map(len, complete[: len(rows) - 1]))
            self._newest = complete[len(rows) - 1].partition(b",")[0] + b","
        for row in rows:
            self.last |= row
        if rows:
            self._update_step(int(rows[-1]["step"]))
        return rows

    def seconds_left(self) -> float | None:
        """Estimate the remaining time from the pace since the first row seen; None if it is too early."""
        if self._start is None or self.max_steps is None:
            return None
        started_at, first_step = self._start
        if self.step <= first_step:
            return None
        step_seconds = (time.monotonic() - started_at) / (self.step - first_step)
        return step_seconds * max(0, self.max_steps - self.step)

    def _is_at_newest(self, file: BinaryIO) -> bool:
        """Return whether the newest row is still where it was; a run that rolls back removes rows and writes others."""
        file.seek(self._offset - 1 if self._newest else 0)
        return not self._newest or file.read(1 + len(self._newest)) == b"\n" + self._newest

    def _parse(self, line: bytes) -> dict[str, float] | None:
        """Return a row; None if it is a mixture of its old and new content."""
        try:
            cells = next(csv.reader([line.decode()]))
            pairs = zip(self._columns, cells, strict=False)
            row = {name: float(cell) for name, cell in pairs if cell}
        except (ValueError, csv.Error, StopIteration):
            return None
        return row if math.isfinite(row.get("step", math.nan)) else None

    def _update_step(self, step: int) -> None:
        if self._start is None or step < self.step:  # the run has resumed or rolled back
            self._start = (time.monotonic(), step)
        self.step = step
