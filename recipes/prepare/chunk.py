"""First pass over documents, by chunk in any process: clean, filter, and write the remaining documents.

What a chunk leaves depends on its rows alone: three files, the last of which says that it is complete.
"""

import hashlib
import json
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from recipes.data.documents.rows import read_text
from recipes.data.parallel import group_by_bytes
from recipes.data.read_rows import Row
from recipes.errors import ConfigError
from recipes.prepare.contamination import EvaluationSet
from recipes.prepare.minhash import BandHasher, shingles
from recipes.prepare.quality import clean, find_failures

UNREADABLE, EMPTY, QUALITY, CONTAMINATED = "unreadable", "empty", "quality", "contaminated"
NO_DOMAIN = "all"
UNKNOWN_DOMAIN = "unknown"  # of a row without the field that says it

_CHUNK_BYTES = 4 * 1024**2
_CHUNK_ROWS = 4096
MAX_EXAMPLES = 3  # of a rule, in a chunk and in all
MAX_LISTED = 20  # rows that cannot be read, documents that repeat an evaluation set
SHOWN_CHARACTERS = 300
_ALL = "all"

Facts = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows.

    Attributes:
        number: From 0.
        rows: Not parsed.
    """

    number: int
    rows: list[Row]


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What documents are judged by; picklable, sent to each process once.

    Attributes:
        folder: Of the files that chunks leave.
        text_field: Name of the field that holds the text.
        domain_field: Name of the field that says of what kind it is; None: all are of one kind.
        rules: Limits by name.
        rules_off: Rules that do not hold for a kind; "all": none does.
        evaluation: Texts that documents must not repeat; None: any may.
        hasher: Of near copies; None: they stay.
    """

    folder: Path
    text_field: str
    domain_field: str | None
    rules: Mapping[str, Any]
    rules_off: Mapping[str, Any]
    evaluation: EvaluationSet | None
    hasher: BandHasher | None

    def rules_of(self, domain: str) -> Mapping[str, Any]:
        """Return the rules that hold for a kind of documents."""
        off = self.rules_off.get(domain, [])
        return {} if off == _ALL else {name: limit for name, limit in self.rules.items() if name not in off}


@dataclass
class _Kept:
    """The documents of a chunk that stay so far."""

    lines: list[bytes] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    keys: list[NDArray[np.uint64]] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)


def group_rows(rows: Iterable[Row]) -> Iterator[Chunk]:
    """Yield chunks of about 4 MiB; where they end depends on the rows alone."""
    tasks = group_by_bytes(rows, max_bytes=_CHUNK_BYTES, max_items=_CHUNK_ROWS)
    return (Chunk(number, task) for number, task in enumerate(tasks))


def chunk_path(folder: Path, number: int, suffix: str) -> Path:
    """Return a file of a chunk: `.jsonl`, its documents; `.json`, its facts; `.npz`, its arrays, written last."""
    return folder / f"{number:06}{suffix}"


def empty_facts() -> Facts:
    """Return the facts of no documents; the counts of a domain and of a rule are 0 when they are first looked up."""
    return {
        "domains": defaultdict(lambda: {"documents": 0, "bytes": 0, "dropped": Counter(), "dropped_bytes": Counter()}),
        "rules": defaultdict(lambda: {"failed": 0, "first": 0, "domains": Counter(), "examples": []}),
        "lines": Counter(),
        "unreadable": [],
        "contaminated": [],
        "items": defaultdict(float),
    }


def judge_chunk(chunk: Chunk, *, filters: Filters) -> None:
    """Judge the rows of a chunk and write what it leaves."""
    facts = empty_facts()
    kept = _Kept()
    for row in chunk.rows:
        _judge(row, filters, facts, kept)
    num_bands = 0 if filters.hasher is None else filters.hasher.num_bands
    arrays = {
        "line_bytes": np.array([len(line) for line in kept.lines], dtype=np.int64),  # [N]
        "text_bytes": np.array(kept.text_bytes, dtype=np.int64),  # [N]
        "digests": np.frombuffer(b"".join(kept.digests) or bytes(0), dtype="<u8").reshape(len(kept.lines), 2),  # [N, 2]
        "keys": np.array(kept.keys, dtype=np.uint64).reshape(len(kept.keys), num_bands),  # [N, B]
        "domains": np.array(kept.domains, dtype=np.str_),  # [N]
    }
    write_file(chunk_path(filters.folder, chunk.number, ".jsonl"), b"".join(kept.lines))
    write_file(chunk_path(filters.folder, chunk.number, ".json"), json.dumps(facts).encode())
    with create_file(chunk_path(filters.folder, chunk.number, ".npz")) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _judge(row: Row, filters: Filters, facts: Facts, kept: _Kept) -> None:
    try:
        fields = row.parse()
        text = read_text(row, filters.text_field)
        num_bytes = len(text.encode())  # halves of characters outside the basic plane cannot be written
    except (ConfigError, UnicodeEncodeError) as error:
        half = "its text holds half a character (a lone surrogate)"
        _drop(facts, NO_DOMAIN, UNREADABLE, row.num_bytes)
        reason = error.reason if isinstance(error, ConfigError) else half
        _list(facts["unreadable"], {"place": row.place, "reason": reason})
        return
    domain = NO_DOMAIN if filters.domain_field is None else str(fields.get(filters.domain_field, UNKNOWN_DOMAIN))
    rules = filters.rules_of(domain)
    cleaned, removed = clean(text, rules)
    facts["lines"].update(removed)
    if not cleaned.strip():
        _drop(facts, domain, EMPTY, num_bytes)
        return
    if failures := find_failures(cleaned, rules):
        _note_failures(facts, failures, place=row.place, domain=domain, text=cleaned)
        _drop(facts, domain, QUALITY, num_bytes)
        return
    if filters.evaluation is not None and _repeats_evaluation(facts, filters.evaluation, row.place, cleaned):
        _drop(facts, domain, CONTAMINATED, num_bytes)
        return
    _drop(facts, domain, None, num_bytes)
    normal = unicodedata.normalize("NFC", cleaned).strip()
    kept.digests.append(hashlib.blake2b(normal.encode(), digest_size=16).digest())
    if filters.hasher is not None:
        kept.keys.append(filters.hasher.band_keys(shingles(cleaned)))
    kept.domains.append(domain)
    kept.text_bytes.append(num_bytes)
    line = json.dumps(fields | {filters.text_field: cleaned}, ensure_ascii=False, default=str)
    kept.lines.append(line.encode("utf-8", "surrogatepass") + b"\n")


def _repeats_evaluation(facts: Facts, evaluation: EvaluationSet, place: str, text: str) -> bool:
    """Note the items that a document shares a passage with, and return whether it holds too much of one."""
    hits = evaluation.find(text)
    for hit in hits:
        facts["items"][hit.item] = max(hit.coverage, facts["items"][hit.item])
    if not evaluation.is_contaminated(hits):
        return False
    _list(facts["contaminated"], {"place": place} | hits[0]._asdict())
    return True


def _note_failures(facts: Facts, failures: Mapping[str, float], *, place: str, domain: str, text: str) -> None:
    """Count each rule that a document fails, and keep the first documents as examples."""
    for index, (name, value) in enumerate(failures.items()):
        rule = facts["rules"][name]
        rule["failed"] += 1
        rule["first"] += index == 0
        rule["domains"][domain] += 1
        if len(rule["examples"]) < MAX_EXAMPLES:
            rule["examples"].append({"place": place, "value": value, "text": text[:SHOWN_CHARACTERS]})


def _drop(facts: Facts, domain: str, reason: str | None, num_bytes: int) -> None:
    """Count a document and, if there is a reason to drop it, the reason."""
    known = facts["domains"][domain]
    known["documents"] += 1
    known["bytes"] += num_bytes
    if reason is not None:
        known["dropped"][reason] += 1
        known["dropped_bytes"][reason] += num_bytes


def _list(listed: list[Any], entry: Any) -> None:
    if len(listed) < MAX_LISTED:
        listed.append(entry)


@contextmanager
def create_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write so that nobody finds half of it."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        yield file
    os.replace(temporary, path)


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that nobody finds half of it."""
    with create_file(path) as file:
        file.write(data)
