"""First pass over documents, one chunk at a time in any process: clean, filter, write the survivors.

The output of a chunk depends only on its rows: three files, the last of which marks the chunk as complete.
"""

import base64
import hashlib
import json
import math
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
from recipes.files import replacing
from recipes.prepare.contamination import EvaluationSet
from recipes.prepare.minhash import BandHasher, shingles
from recipes.prepare.quality import clean, find_failures

UNREADABLE, EMPTY, QUALITY, CONTAMINATED = "unreadable", "empty", "quality", "contaminated"
NO_DOMAIN = "all"
UNKNOWN_DOMAIN = "unknown"  # for a row without the domain field, or with null there

_CHUNK_BYTES = 4 * 1024**2
_CHUNK_ROWS = 4096
MAX_EXAMPLES = 3  # per rule, in a chunk and in total
MAX_LISTED = 20  # unreadable rows, contaminated documents
SHOWN_CHARACTERS = 300
_ALL = "all"

Facts = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows.

    Attributes:
        number: Index from 0.
        rows: Unparsed rows.
    """

    number: int
    rows: list[Row]


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Filters for documents; picklable, sent to each process once.

    Attributes:
        folder: Folder of the chunk files.
        text_field: Name of the field that holds the text.
        domain_field: Name of the field that holds the domain; None: a single domain.
        rules: Limits by name.
        disabled_rules: Rules disabled for a domain; "all" disables every rule.
        evaluation: Evaluation items that documents must not contain; None: not checked.
        hasher: MinHash for near copies; None: near copies are kept.
    """

    folder: Path
    text_field: str
    domain_field: str | None
    rules: Mapping[str, Any]
    disabled_rules: Mapping[str, Any]
    evaluation: EvaluationSet | None
    hasher: BandHasher | None

    def rules_of(self, domain: str) -> Mapping[str, Any]:
        """Return the rules that apply to a domain."""
        off = self.disabled_rules.get(domain, [])
        return {} if off == _ALL else {name: limit for name, limit in self.rules.items() if name not in off}


@dataclass
class _Kept:
    """Documents of a chunk that have passed so far."""

    lines: list[bytes] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    keys: list[NDArray[np.uint64]] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)


def group_rows(rows: Iterable[Row]) -> Iterator[Chunk]:
    """Yield chunks of about 4 MiB; their boundaries depend only on the rows."""
    tasks = group_by_bytes(rows, max_bytes=_CHUNK_BYTES, max_items=_CHUNK_ROWS)
    return (Chunk(number, task) for number, task in enumerate(tasks))


def chunk_path(folder: Path, number: int, suffix: str) -> Path:
    """Return a file of a chunk: documents (`.jsonl`), facts (`.json`), or arrays (`.npz`, written last)."""
    return folder / f"{number:06}{suffix}"


def empty_facts() -> Facts:
    """Return the facts of zero documents; counts of a domain or rule start at 0 on first access."""
    return {
        "domains": defaultdict(lambda: {"documents": 0, "bytes": 0, "dropped": Counter(), "dropped_bytes": Counter()}),
        "rules": defaultdict(lambda: {"failed": 0, "first": 0, "domains": Counter(), "examples": []}),
        "lines": Counter(),
        "unreadable": [],
        "contaminated": [],
        "items": defaultdict(float),
    }


def judge_chunk(chunk: Chunk, *, filters: Filters) -> None:
    """Judge the rows of a chunk and write its files."""
    facts = empty_facts()
    kept = _Kept()
    for row in chunk.rows:
        _judge(row, filters, facts, kept)
    num_bands = 0 if filters.hasher is None else filters.hasher.num_bands
    arrays: dict[str, Any] = {
        "line_bytes": np.array([len(line) for line in kept.lines], dtype=np.int64),  # [N]
        "text_bytes": np.array(kept.text_bytes, dtype=np.int64),  # [N]
        "digests": np.frombuffer(b"".join(kept.digests) or bytes(0), dtype="<u8").reshape(len(kept.lines), 2),  # [N, 2]
        "keys": np.array(kept.keys, dtype=np.uint64).reshape(len(kept.keys), num_bands),  # [N, B]
        "domains": np.array(kept.domains, dtype=np.str_),  # [N]
    }
    write_file(chunk_path(filters.folder, chunk.number, ".jsonl"), b"".join(kept.lines))
    write_file(chunk_path(filters.folder, chunk.number, ".json"), json.dumps(facts).encode())
    with create_file(chunk_path(filters.folder, chunk.number, ".npz")) as file:
        np.savez(file, **arrays)


def _judge(row: Row, filters: Filters, facts: Facts, kept: _Kept) -> None:
    try:
        fields = row.parse()
        text = read_text(row, filters.text_field)
        num_bytes = len(text.encode())  # raises for lone surrogates
    except (ConfigError, UnicodeEncodeError) as error:
        half = "its text holds half a character (a lone surrogate)"
        _drop(facts, NO_DOMAIN, UNREADABLE, row.num_bytes)
        reason = error.reason if isinstance(error, ConfigError) else half
        _list(facts["unreadable"], {"place": row.place, "reason": reason})
        return
    domain = NO_DOMAIN if filters.domain_field is None else _find_domain(fields, filters.domain_field)
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
    kept.lines.append(_to_line(fields | {filters.text_field: cleaned}))


def _to_line(fields: Mapping[str, Any]) -> bytes:
    """Return the fields of a row as a line of JSON, which has fewer types than Parquet."""
    try:
        line = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        line = json.dumps(_to_json(fields), ensure_ascii=False, allow_nan=False)
    return line.encode("utf-8", "surrogatepass") + b"\n"


def _to_json(value: Any) -> Any:
    """Return a value of JSON: null for NaN and infinity, text or base64 for bytes, text for dates and decimals."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(child) for child in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return base64.b64encode(value).decode("ascii")
    return value if value is None or isinstance(value, str | int) else str(value)


def _find_domain(fields: Mapping[str, Any], name: str) -> str:
    value = _to_json(fields.get(name))
    return UNKNOWN_DOMAIN if value is None else str(value)


def _repeats_evaluation(facts: Facts, evaluation: EvaluationSet, place: str, text: str) -> bool:
    """Record the items that share a passage with a document, and return whether the document is contaminated."""
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
    """Count a document, and the reason if it is dropped."""
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
    """Open a file for writing such that no partial file is ever visible."""
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        yield file


def write_file(path: Path, data: bytes) -> None:
    """Write a file such that no partial file is ever visible."""
    with create_file(path) as file:
        file.write(data)
