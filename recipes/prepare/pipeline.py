"""Document pipeline: one parallel filtering pass, then deduplication, then output files.

Every file is written atomically and depends only on input and settings: a killed pipeline resumes where it stopped, and
the output does not depend on the number of processes.
"""

import functools
import hashlib
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.data.found_files import PREPARED
from recipes.data.parallel import map_in_order
from recipes.data.read_rows import Rows
from recipes.errors import ConfigError, shell
from recipes.files import count
from recipes.prepare.chunk import (
    CONTAMINATED,
    QUALITY,
    UNREADABLE,
    Chunk,
    Facts,
    Filters,
    chunk_path,
    create_file,
    group_rows,
    judge_chunk,
    write_file,
)
from recipes.prepare.near_duplicates import Bools, Copies
from recipes.prepare.report import EXACT, NEAR, count_copies, describe_dropped, make_report, merge
from recipes.prepare.survivors import Survivors, cut_shards
from recipes.run_folder import read_json
from recipes.runtime import status
from recipes.runtime.lock import lock_run_folder

LOGGER = logging.getLogger("lightning_recipes")

REPORT, DOCUMENTS = PREPARED
WORK = "unfinished"
_STATE = "state.json"
_VERSION = 2  # increase when the same input and settings yield different documents
_SECONDS_BETWEEN_LINES = 30.0


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Filters, deduplication and output of a preparation.

    Attributes:
        output: Folder for the kept documents and the report.
        filters: Filters of the first pass.
        removes_exact: Whether exact copies of an earlier document are dropped.
        near_threshold: Minimum Jaccard similarity of a near copy; None: near copies are kept.
        max_compared: Maximum number of originals compared per document.
        shard_bytes: Maximum size of an output file.
        settings: Settings of the user, for the report.
    """

    output: Path
    filters: Filters
    removes_exact: bool
    near_threshold: float | None
    max_compared: int
    shard_bytes: int
    settings: Mapping[str, Any]

    def run(self, rows: Rows, *, content_hash: str, num_processes: int) -> Facts:
        """Prepare documents and return the report; a finished preparation is only read.

        Args:
            rows: Input documents.
            content_hash: Hash of the rows and of every other file that the settings name.
            num_processes: Processes of the first pass.

        Raises:
            ConfigError: The folder holds something else, a row cannot be read, or no document is kept.
        """
        key = json.dumps([_VERSION, content_hash, dict(self.settings)], sort_keys=True)
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        if (finished := self._open_folder(digest)) is not None:
            LOGGER.info("%s already holds these documents", self.output)
            return finished
        with lock_run_folder(self._work, setting="mode.output"):
            return self._prepare(rows, digest, num_processes)

    def _prepare(self, rows: Rows, digest: str, num_processes: int) -> Facts:
        num_chunks = self._judge(rows, num_processes)
        facts = merge(_read_facts(self._work, num_chunks))
        survivors = self._survivors(rows.name, facts, num_chunks)
        is_first = survivors.find_first() if self.removes_exact else np.ones(len(survivors), dtype=np.bool_)
        near = self._find_near(survivors, is_first)
        is_near = np.zeros(len(survivors), dtype=np.bool_)
        if near is not None:
            is_near[[copy.document for copy in near.copies]] = True
        count_copies(facts, survivors, {EXACT: ~is_first, NEAR: is_near})
        self._write(survivors, np.flatnonzero(is_first & ~is_near))
        report = make_report(
            facts,
            survivors,
            rules=self.filters.rules,
            near=near,
            evaluation=self.filters.evaluation,
            settings=self.settings,
        )
        text = json.dumps({"input": digest} | report, indent=1, ensure_ascii=False)
        write_file(self.output / REPORT, text.encode("utf-8", "surrogatepass"))
        shutil.rmtree(self._work)
        return report

    @property
    def _work(self) -> Path:
        return self.output / WORK

    def _open_folder(self, digest: str) -> Facts | None:
        """Prepare the output folder; return the report if the preparation is finished."""
        report, state = self.output / REPORT, self._work / _STATE
        typed, fix = f"mode.output={self.output}", "mode.output=<another folder>"
        if report.is_file():
            found: Facts = read_json(report, fix=fix)
            if found.get("input") != digest:
                raise ConfigError(typed, "it contains documents from a different input or settings", fix)
            return found
        if state.is_file():
            if json.loads(state.read_text(encoding="utf-8")) != digest:
                reason = "an unfinished preparation with a different input or settings is there"
                raise ConfigError(typed, reason, f"{fix}, or {shell('rm -r', self.output)}")
            LOGGER.info("%s: resuming", self.output)
            return None
        if self.output.is_dir() and any(self.output.iterdir()) and not self._work.is_dir():
            raise ConfigError(typed, "the folder is not empty", fix)
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            write_file(state, json.dumps(digest).encode())
        except OSError as error:
            raise ConfigError(typed, f"it cannot be written to: {error.strerror}", fix) from error
        return None

    def _judge(self, rows: Rows, num_processes: int) -> int:
        """Judge the chunks that are not finished; return the total number of chunks."""
        progress = _Progress(rows.num_bytes)
        num_chunks = 0

        def missing() -> Iterator[Chunk]:
            nonlocal num_chunks
            for chunk in group_rows(rows):
                num_chunks += 1
                if chunk_path(self.filters.folder, chunk.number, ".npz").is_file():
                    progress.advance(chunk)
                else:
                    yield chunk

        judge = functools.partial(judge_chunk, filters=self.filters)
        for chunk, _ in map_in_order(judge, missing(), workers=num_processes):
            progress.advance(chunk)
        return num_chunks

    def _survivors(self, name: str, facts: Facts, num_chunks: int) -> Survivors:
        num_documents = sum(domain["documents"] for domain in facts["domains"].values())
        if not num_documents:
            shutil.rmtree(self._work)
            raise ConfigError(f"data.path={name}", "there is no document to prepare", "data.path=<documents>")
        if num_chunks:
            survivors = Survivors(self._work, num_chunks, text_field=self.filters.text_field)
            if len(survivors):
                return survivors
        shutil.rmtree(self._work)
        raise self._explain(name, facts, num_documents)

    def _explain(self, name: str, facts: Facts, num_documents: int) -> ConfigError:
        """Return the error for rules that no document passes, at the setting that drops most."""
        dropped = sum((Counter(domain["dropped"]) for domain in facts["domains"].values()), Counter[str]())
        first = f"; the first: {facts['unreadable'][0]['reason']}" if facts["unreadable"] else ""
        who = "the only document was" if num_documents == 1 else f"all {num_documents:,} documents were"
        reason = f"{who} dropped: {', '.join(describe_dropped(*item) for item in sorted(dropped.items()))}{first}"
        [(most, _)] = dropped.most_common(1)
        setting, fix = f"data.path={name}", "data.path=<documents>"
        if most == UNREADABLE:
            fix = f"data.text_field=<the field of the text>, or {fix}"
        elif most == QUALITY:
            rules = sorted(facts["rules"], key=lambda rule: -facts["rules"][rule]["first"])
            setting = f"quality.{rules[0]}={self.filters.rules[rules[0]]}"
            fix = f"{' '.join(f'quality.{rule}=null' for rule in rules)}, or {fix} that pass"
        elif most == CONTAMINATED:
            sets = self.settings["evaluation"]
            setting = f"mode.evaluation={{{', '.join(f'{one}: …' for one in sets)}}}"
            fix = "'mode.evaluation={}' to keep them, or other documents in data.path"
        return ConfigError(setting, reason, fix)

    def _find_near(self, survivors: Survivors, is_first: Bools) -> Copies | None:
        if self.near_threshold is None:
            return None
        LOGGER.info("looking for near copies among %s", count(int(is_first.sum()), "document"))
        return survivors.find_near_copies(is_first, threshold=self.near_threshold, max_compared=self.max_compared)

    def _write(self, survivors: Survivors, kept: NDArray[np.int64]) -> None:
        """Write the kept documents in order; existing files already have the same content."""
        folder = self.output / DOCUMENTS
        folder.mkdir(exist_ok=True)
        sizes = survivors.line_bytes[kept]
        for number, (start, stop) in enumerate(cut_shards(sizes.tolist(), self.shard_bytes)):
            path = folder / f"{number:05}.jsonl"
            if path.is_file():
                continue
            with create_file(path) as file:
                file.writelines(survivors.lines(kept[start:stop]))


def _read_facts(folder: Path, num_chunks: int) -> Iterator[Facts]:
    for number in range(num_chunks):
        yield json.loads(chunk_path(folder, number, ".json").read_text(encoding="utf-8"))


class _Progress:
    """Logs the progress at intervals.

    Args:
        num_bytes: Approximate size of all rows.
    """

    def __init__(self, num_bytes: int) -> None:
        self._total = num_bytes
        self._done = 0
        self._logged = time.monotonic()

    def advance(self, chunk: Chunk) -> None:
        """Count a chunk."""
        self._done += sum(row.num_bytes for row in chunk.rows)
        status.say(f"{self._done / 1e6:,.1f} of about {self._total / 1e6:,.1f} MB judged")
        if time.monotonic() - self._logged > _SECONDS_BETWEEN_LINES:
            self._logged = time.monotonic()
            LOGGER.info("%.1f of about %.1f MB judged", self._done / 1e6, self._total / 1e6)
