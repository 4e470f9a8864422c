"""What W&B knows of the steps before a resume: nothing is told twice, and what a kill has taken is told again."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.run_folder import METRICS_FILE
from typing import Any
from collections.abc import Iterator
from pathlib import Path
import json
import logging
import struct

_OF_CLOCKS = ("time/", "throughput/", "memory/")  # differ whenever a step is made again

Row = dict[str, Any]


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

    def log_missed_rows(self, run: Any) -> None:
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


LOGGER = logging.getLogger("lightning_recipes")


STEP = "trainer/global_step"



# the file is a log in the format of LevelDB: blocks of records, each with a checksum, a length and a kind
# (github.com/google/leveldb, doc/log_format.md), after a header of W&B's own
_BLOCK_BYTES = 32_768


_HEADER_BYTES = 7


_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


_TAIL_BLOCKS = 256  # 8 MiB, some 5,000 rows: more than lie between two checkpoints


def rows_in_file(wandb_folder: Path, run_id: str) -> dict[int, Row] | None:
    """The newest rows by step, of the branch that the run was on last; None where a file could not be read."""
    for path in sorted(wandb_folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"), reverse=True):
        try:
            rows = list(_rows(path))
        except Exception as error:  # another version's format: rows may then be told twice
            LOGGER.warning(f"{path} could not be read: {error}; W&B may show steps twice")
            return None
        if rows:
            return _branch(rows)
    return {}


def _branch(rows: list[Row]) -> dict[int, Row]:
    """What a rollback or a resume has undone is left out."""
    branch: dict[int, Row] = {}
    for row in rows:
        step = int(row[STEP])
        for undone in [told for told in branch if told > step]:
            del branch[undone]
        branch[step] = branch.get(step, {}) | row
    return branch


def _rows(path: Path) -> Iterator[Row]:
    from wandb.proto import wandb_internal_pb2

    for content in _records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {(one.key or ".".join(one.nested_key)): one.value_json for one in items}
            if STEP in row:
                yield {name: json.loads(value) for name, value in row.items()}


def _records(path: Path) -> Iterator[bytes]:
    """Whole records of the last blocks; a record that a kill has torn is left out."""
    num_blocks = -(-path.stat().st_size // _BLOCK_BYTES)
    start = max(0, num_blocks - _TAIL_BLOCKS) * _BLOCK_BYTES
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    at = 0 if start else _HEADER_BYTES
    parts: list[bytes] | None = None  # none: the record began before the tail
    while at + _HEADER_BYTES <= len(data):
        if (left := _BLOCK_BYTES - at % _BLOCK_BYTES) < _HEADER_BYTES:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        content = data[at + _HEADER_BYTES : at + _HEADER_BYTES + length]
        at += _HEADER_BYTES + length
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(content) < length:
            return
        if kind in (_WHOLE, _FIRST):
            parts = []
        if parts is not None:
            parts.append(content)
            if kind in (_WHOLE, _LAST):
                yield b"".join(parts)
                parts = None
