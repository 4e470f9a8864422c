"""Which rows W&B has: wandb_run.json keeps the run's id and the newest row sent, so that a resume repeats none."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.run_folder import METRICS_FILE, read_rows, write_atomically

ID_FILE = "wandb_run.json"
STEP = "trainer/global_step"


class SentRows:
    """The rows of a run that were handed to W&B, by this process and those before it.

    W&B only appends: a second row of a step would be drawn as a second point. So the newest step is written to
    wandb_run.json *before* its rows are handed over, and after a resume rows up to that step are skipped, even where
    they differ. A kill can cost W&B the rows of about its last second, which W&B had not written to its own file;
    metrics.csv has them.

    Args:
        folder: The run folder.
        saved_id: The run's id in the checkpoint that the run resumes from; used if wandb_run.json is lost. The rows
            since that checkpoint are then sent again.
        resumed_at: Completed optimizer steps at the resume. None for a new run.
    """

    def __init__(self, folder: Path, saved_id: str | None, *, resumed_at: int | None) -> None:
        self._folder = folder
        self._resumed_at = resumed_at
        path = folder / ID_FILE
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        # an id in the environment (a W&B sweep sets one) wins over the folder's
        kept_id = record.get("id") or saved_id
        self.run_id: str = os.environ.get("WANDB_RUN_ID") or kept_id or secrets.token_hex(4)
        self._step = 0  # the newest step that W&B has
        self._columns: list[str] | None = None  # of its row, if a later row may add to them
        if self.run_id == record.get("id"):
            self._step = record.get("step", resumed_at or 0)
            self._columns = record.get("columns")
        elif self.run_id == saved_id:
            self._step = resumed_at or 0
        # of the last row that W&B accepted; None: what wandb_run.json had at the start
        self._accepted: tuple[int | None, None] = (None, None)
        self._is_past = resumed_at is None  # whether every further row is new

    def save(self, step: int | None = None, columns: Iterable[str] | None = None) -> None:
        """Write wandb_run.json. On a full disk it keeps an older step, and a resume may repeat rows.

        Args:
            step: The newest step sent. None keeps the newest step of the processes before this one.
            columns: The metrics in its row; another metric of that step may still follow. None: none will.
        """
        if step is None:
            step, columns = self._step, self._columns
        columns = None if columns is None else sorted(columns)
        record = {"id": self.run_id, "step": step, "columns": columns}
        with contextlib.suppress(OSError):
            write_atomically(self._folder / ID_FILE, json.dumps(record) + "\n")

    def set_newest_at_server(self, step: int) -> None:
        """Correct the newest step to what has reached the server: part of what was sent may have been lost."""
        if step != self._step:
            self._step, self._columns = step, None

    def send(self, run: Any, rows: list[dict[str, Any]]) -> None:
        """Hand rows to W&B, in order, once wandb_run.json says so.

        Raises:
            Exception: W&B accepted no more (its process was killed, say); wandb_run.json has the last row that it did.
        """
        if not rows:
            return
        step, columns = rows[-1][STEP], set(rows[-1])
        if step == self._step and self._columns is not None:
            columns |= set(self._columns)
        self.save(step, columns)
        for row in rows:
            try:
                run.log(row)
            except Exception:
                self.save(*self._accepted)
                raise
            self._accepted = (row[STEP], None)

    def send_missed(self, run: Any) -> None:
        """Hand over the rows of metrics.csv that W&B does not have, up to the step of the resume."""
        rows = [{STEP: int(row.pop("step"))} | row for row in read_rows(self._folder / METRICS_FILE)]
        self.send(run, [row for row in rows if self._step < row[STEP] <= (self._resumed_at or 0)])

    def get_unsent(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what W&B does not have of a row: everything, nothing, or the metrics added to its newest row."""
        if self._is_past or row[STEP] > self._step:
            self._is_past = True
            return dict(row)
        if row[STEP] < self._step or self._columns is None:
            return {}
        added = {name: value for name, value in row.items() if name not in self._columns}
        return {STEP: row[STEP]} | added if added else {}

    def skip_nothing(self) -> None:
        """Take every further row as new: the run has rolled back, and its next rows follow those in W&B."""
        self._is_past = True
