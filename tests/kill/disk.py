"""What a run has left in its folder, read without the code that wrote it where a number can tell."""

import csv
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
_TAIL_BYTES = 2048


@dataclass(frozen=True, kw_only=True)
class Disk:
    """What lies in a run folder at one moment, when no process writes there.

    Attributes:
        row: Step of the last whole row of metrics.csv; 0: there is none.
        whole: Step of every whole checkpoint -> its folder.
        last: Whether `checkpoints/last` leads to a whole checkpoint; None: there is no such link.
    """

    row: int
    whole: dict[int, Path]
    last: bool | None

    @property
    def newest(self) -> int:
        return max(self.whole, default=-1)


def look(folder: Path) -> Disk:
    """Judge every checkpoint by its own manifest."""
    checkpoints = folder / "checkpoints"
    whole = {
        int(path.name[5:12]): path for path in checkpoints.glob("step_*.ckpt") if is_whole(path)
    }
    last = checkpoints / "last"
    linked = last.is_symlink() or last.exists()
    return Disk(
        row=last_row(folder),
        whole=whole,
        last=is_whole(last) if linked else None,
    )


def is_whole(checkpoint: Path) -> bool:
    """Whether every file that the manifest lists is there in its full size."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        return all(
            (checkpoint / name).stat().st_size == entry["bytes"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def last_row(folder: Path) -> int:
    """Step of the last whole line of metrics.csv; 0 where there is none."""
    try:
        with (folder / "metrics.csv").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # what follows the last line end is half a line
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
    """The step at which the life began whose first event lies at a byte of events.jsonl; None: not yet."""
    if events_size(folder) <= offset:
        return None
    with (folder / "events.jsonl").open("rb") as file:
        file.seek(offset)
        line = file.readline()
    return int(json.loads(line)["step"]) if line.endswith(b"\n") else None


def saves(folder: Path) -> set[tuple[str, int]]:
    """Folders that a checkpoint is being written to, each with the time of its last change."""
    found = set()
    for path in (folder / "checkpoints").glob("step_*.tmp*"):
        try:
            found.add((path.name, path.stat().st_ctime_ns))
        except OSError:
            continue  # it has just been renamed
    return found


def rows(folder: Path) -> list[dict[str, str]]:
    """metrics.csv as text, without what is measured."""
    with (folder / "metrics.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or [])
        assert len(names) == len(set(names)), f"a column twice: {names}"
        return [
            {name: value for name, value in row.items() if not name.startswith(MEASURED)}
            for row in reader
        ]


def differences(folder: Path, reference: Path) -> Iterator[str]:
    """Where a finished run is not the one that was never killed; nothing: they are equal bit for bit."""
    yield from _different_rows(rows(folder), rows(reference))
    for number, line in enumerate((folder / "events.jsonl").read_text().splitlines(), start=1):
        try:
            json.loads(line)
        except ValueError:
            yield f"line {number} of events.jsonl is {line!r}"
    mine, theirs = look(folder), look(reference)
    if mine.newest != theirs.newest:
        yield f"the last checkpoint is of step {mine.newest}, not {theirs.newest}"
        return
    here, there = (state(disk.whole[disk.newest]) for disk in (mine, theirs))
    for name in sorted(here.keys() ^ there.keys()):
        yield f"only one checkpoint has {name}"
    for name in here.keys() & there.keys():
        if not _same(here[name], there[name]):
            yield f"{name} differs: {here[name]} and {there[name]}"


def _different_rows(mine: list[dict[str, str]], theirs: list[dict[str, str]]) -> Iterator[str]:
    steps, expected = [row["step"] for row in mine], [row["step"] for row in theirs]
    if steps != expected:
        yield f"rows of other steps: {sorted(set(steps) ^ set(expected))}, {len(steps)} and {len(expected)}"
        return
    for row, wanted in zip(mine, theirs, strict=True):
        for name in row.keys() | wanted.keys():
            if row.get(name) != wanted.get(name):
                yield f"step {row['step']}, {name}: {row.get(name)} and {wanted.get(name)}"


def state(checkpoint: Path) -> dict[str, Any]:
    """Every number of a checkpoint by its place; of what is no tensor, that which no clock has a part in."""
    files = sorted(checkpoint.glob("*.safetensors"))
    if files:
        return {
            f"{file.name}/{name}": tensor
            for file in files
            for name, tensor in load_file(file).items()
        }
    whole = FolderCheckpointIO().load_checkpoint(checkpoint)
    return {
        place: value
        for place, value in _leaves(whole)
        if isinstance(value, Tensor) or not place.startswith("/callbacks")
    }


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{place}/{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}/{number}")
    else:
        yield place, value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
