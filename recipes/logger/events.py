"""events.jsonl: one JSON line per event (start, checkpoint, spike, end, …), written as it happens."""

import json
import time
from pathlib import Path
from typing import Any

from recipes.run_folder import EVENTS_FILE, complete_lines, read_json_lines, write_atomically

# Events of the run itself about a process or the disk: a resume does not drop them. A callback declares its own with
# `kept_on_resume`, see `callbacks.events.EventKind`.
PROCESS_EVENTS = (
    "start",
    "resume",
    "checkpoint_rejected",
    "checkpoint_failed",
    "preempted",
    "oom",
    "stop",
    "end",
)


class EventFile:
    """Appends events to events.jsonl; lines that could not be written are written together with the next one.

    Args:
        run_folder: The run folder.
    """

    def __init__(self, *, run_folder: Path) -> None:
        self._path = run_folder / EVENTS_FILE
        self._unwritten: list[str] = []
        self._num_bytes: int | None = None  # of complete lines; None until the first write

    def append(self, event: str, step: int, **fields: Any) -> None:
        """Write one event.

        Raises:
            OSError: The disk is full; the event is written with the next one.
        """
        line = {"time": round(time.time(), 3), "step": step, "event": event} | fields
        self._unwritten.append(json.dumps(line) + "\n")
        self._path.touch()
        if self._num_bytes is None:
            self._num_bytes = self._path.stat().st_size
        self._num_bytes = replace_end(self._path, "".join(self._unwritten), self._num_bytes)
        self._unwritten = []

    def has(self, event: str, step: int) -> bool:
        """Return whether an event of a step is in the file."""
        return any(e["event"] == event and e["step"] == step for e in read_json_lines(self._path))

    def drop_after(self, step: int, *, num_rollbacks: int) -> None:
        """Drop the events that training will repeat after a resume, and a last line torn by a kill.

        Args:
            step: Completed optimizer steps of the checkpoint.
            num_rollbacks: Rollbacks before the checkpoint; earlier events stay, whatever their step.
        """
        if not self._path.is_file():
            return
        lines = list(complete_lines(self._path))
        events = [json.loads(line) for line in lines]
        rollbacks = [n for n, event in enumerate(events) if event["event"] == "rollback"]
        last_rollback = [-1, *rollbacks][min(num_rollbacks, len(rollbacks))]
        valid = [
            line
            for n, (line, event) in enumerate(zip(lines, events, strict=True))
            if n <= last_rollback
            or event["step"] <= step
            or event["event"] in PROCESS_EVENTS
            or event.get("kept_on_resume", False)
        ]
        write_atomically(self._path, "".join(valid))
        self._num_bytes = None


def replace_end(path: Path, text: str, offset: int) -> int:
    """Replace everything from a byte on with a text, by one write.

    Returns:
        The new size of the file in bytes.

    Raises:
        OSError: The disk is full; part of the text may have been written after `offset`.
    """
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(text.encode())
        file.truncate()
        return file.tell()
