"""What a run has left in its folder, read as far as possible without the code that wrote it."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from recipes.checkpoint.checkpoint_io import FolderCheckpointIO

# columns that differ from run to run
MEASURED = ("time/", "throughput/", "memory/")
MEASURED_OF_ROLLOUTS = ("/time_fraction", "/tokens_per_second")
_TAIL_BYTES = 2048


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The contents of a run folder while no process writes to it.

    Attributes:
        row: Step of the last complete row of metrics.csv; 0 without one.
        complete: Step of every complete checkpoint -> its folder.
        last: Whether `checkpoints/last` leads to a complete checkpoint; None without the link.
    """

    row: int
    complete: dict[int, Path]
    last: bool | None

    @property
    def newest(self) -> int:
        """Step of the newest complete checkpoint; -1 without one."""
        return max(self.complete, default=-1)


def read_disk(folder: Path) -> Disk:
    """Read a run folder, judging every checkpoint by its own manifest."""
    checkpoints = folder / "checkpoints"
    complete = {int(path.name[5:12]): path for path in checkpoints.glob("step_*.ckpt") if is_complete(path)}
    last = checkpoints / "last"
    linked = last.is_symlink() or last.exists()
    return Disk(
        row=last_row(folder),
        complete=complete,
        last=is_complete(last) if linked else None,
    )


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file listed in the manifest exists with its full size."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        return all((checkpoint / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def last_row(folder: Path) -> int:
    """Return the step of the last complete line of metrics.csv; 0 without one."""
    try:
        with (folder / "metrics.csv").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is a partial line
    except OSError:
        return 0
    step = lines[-1].partition(b",")[0] if lines else b""
    return int(step) if step.isdigit() else 0


def events_size(folder: Path) -> int:
    try:
        return (folder / "events.jsonl").stat().st_size
    except OSError:
        return 0


def began_at(folder: Path, offset: int) -> int | None:
    """Return the step of the first event after a byte offset of events.jsonl; None while there is no event."""
    if events_size(folder) <= offset:
        return None
    with (folder / "events.jsonl").open("rb") as file:
        file.seek(offset)
        line = file.readline()
    return int(json.loads(line)["step"]) if line.endswith(b"\n") else None


def saves(folder: Path) -> set[tuple[str, int]]:
    """Return the folders that a checkpoint is being written to, each with its last change time."""
    found = set()
    for path in (folder / "checkpoints").glob("step_*.tmp*"):
        try:
            found.add((path.name, path.stat().st_ctime_ns))
        except OSError:
            continue  # just renamed
    return found


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv as text, without measured columns."""
    with (folder / "metrics.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or [])
        assert len(names) == len(set(names)), f"a column twice: {names}"
        return [
            {
                name: value
                for name, value in row.items()
                if not (name.startswith(MEASURED) or name.endswith(MEASURED_OF_ROLLOUTS))
            }
            for row in reader
        ]


def differences(folder: Path, reference: Path) -> Iterator[str]:
    """Yield every difference of a finished run to the run that was never killed; nothing if they are bit-equal."""
    yield from _different_rows(rows(folder), rows(reference))
    for number, line in enumerate((folder / "events.jsonl").read_text().splitlines(), start=1):
        try:
            json.loads(line)
        except ValueError:
            yield f"line {number} of events.jsonl is {line!r}"
    found, expected = read_disk(folder), read_disk(reference)
    if found.newest != expected.newest:
        yield f"the last checkpoint is of step {found.newest}, not {expected.newest}"
        return
    resumed, uninterrupted = (state(disk.complete[disk.newest]) for disk in (found, expected))
    for name in sorted(resumed.keys() ^ uninterrupted.keys()):
        yield f"only one checkpoint has {name}"
    for name in resumed.keys() & uninterrupted.keys():
        if not _is_equal(resumed[name], uninterrupted[name]):
            yield f"{name} differs: {resumed[name]} and {uninterrupted[name]}"


def _different_rows(found_rows: list[dict[str, str]], expected_rows: list[dict[str, str]]) -> Iterator[str]:
    steps, expected_steps = ([row["step"] for row in rows] for rows in (found_rows, expected_rows))
    if steps != expected_steps:
        unmatched = sorted(set(steps) ^ set(expected_steps))
        yield f"rows of other steps: {unmatched}, {len(steps)} and {len(expected_steps)}"
        return
    for found, expected in zip(found_rows, expected_rows, strict=True):
        for name in found.keys() | expected.keys():
            if found.get(name) != expected.get(name):
                yield f"step {found['step']}, {name}: {found.get(name)} and {expected.get(name)}"


def state(checkpoint: Path) -> dict[str, Any]:
    """Return every tensor of a checkpoint by its path, and every other value that does not depend on a clock."""
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        return dict(_unmeasured(FolderCheckpointIO().load_checkpoint(checkpoint)))
    found: dict[str, Any] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            if name.startswith("values/"):  # plain data of a rank, serialized
                values = torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)
                found |= {f"{file.name}/{name}{path}": value for path, value in _unmeasured(values)}
            else:
                found[f"{file.name}/{name}"] = tensor
    return found


def _unmeasured(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every leaf but the plain values of callbacks, among them measured seconds."""
    for path, value in _leaves(saved):
        if isinstance(value, Tensor) or not path.startswith("/callbacks"):
            yield path, value


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


def _is_equal(value: Any, expected: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(expected, Tensor):
        return value.dtype == expected.dtype and torch.equal(value, expected)
    return type(value) is type(expected) and bool(value == expected)
