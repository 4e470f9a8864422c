"""Prepare documents for training: filter by quality, deduplicate, decontaminate. Needs no GPU and no model."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from recipes.cache import open_cache_dir
from recipes.config.check.types import to_setting
from recipes.config.resolved import ResolvedRun
from recipes.config.traits import declare_mode
from recipes.data.read_rows import Rows, check_split, open_rows
from recipes.errors import ConfigError, type_setting
from recipes.files import count, format_bytes
from recipes.home import expand_home
from recipes.prepare.chunk import NO_DOMAIN, UNKNOWN_DOMAIN, Filters
from recipes.prepare.contamination import EvaluationSet
from recipes.prepare.minhash import BandHasher, choose_bands
from recipes.prepare.pipeline import DOCUMENTS, WORK, Pipeline
from recipes.prepare.quality import RULES, check_rules
from recipes.prepare.report import describe_dropped
from recipes.run_folder import claim_output
from recipes.runtime.console import LOGGER
from recipes.runtime.world import num_cores

PAGE = "report.html"
TEXT_FIELD = "text"  # of data=documents, if none is typed


@declare_mode(prepares_data=True, reads_data=True)
def prepare(
    resolved: ResolvedRun,
    *,
    output: str,
    exact_copies: bool,
    near_copies: Annotated[float, "> 0, <= 1"] | None,
    max_compared: Annotated[int, ">= 1"],
    disabled_rules: dict[str, Any],
    evaluation: dict[str, str],
    evaluation_split: str,
    evaluation_words: Annotated[int, ">= 1"],
    min_coverage: Annotated[float, "> 0, <= 1"],
    shard_mb: Annotated[float, "> 0"],
    num_processes: Annotated[int, ">= 1, <= 256"] | None,
    write_page: Callable[..., None],
) -> int:
    """Write the remaining documents as JSONL, and a page that shows what was dropped and why.

    Args:
        resolved: The composed command; its `data` locates the documents.
        output: Folder for documents and report; a second start in the same folder resumes the first.
        exact_copies: Drop exact duplicates of earlier documents.
        near_copies: Minimum Jaccard similarity of 5-word shingles at which a document counts as a near duplicate of an
            earlier one; None keeps near duplicates.
        max_compared: Maximum number of near-duplicate candidates that each document is compared with.
        disabled_rules: `quality` rules to disable per kind of documents: a list of them, or `all`.
        evaluation: Evaluation files or datasets by name; documents that contain their text are dropped.
        evaluation_split: Split of the Hugging Face datasets in `evaluation`.
        evaluation_words: Length in words of the n-grams to match.
        min_coverage: Minimum fraction of an evaluation item that a document must contain.
        shard_mb: Maximum size of an output file, in MB.
        num_processes: Number of processes; None is one per core.
        write_page: Writes the page: `(path, report)`.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: A setting is invalid, the documents cannot be read, or `output` cannot be written to.
    """
    rules = resolved.quality
    check_rules(rules)
    _check_disabled_rules(disabled_rules, rules)
    source, rows = _open_documents(resolved)
    split: dict[str, str] = {"split_setting": "mode.evaluation_split"}
    paths = {f"mode.evaluation.{name}": path for name, path in evaluation.items()}
    check_split(evaluation_split, paths, default="test", **split)
    _check_kinds(disabled_rules, source.domain_field)
    sets = {
        name: open_rows(path, setting=key, split=evaluation_split, text_field="text", **split)
        for name, (key, path) in zip(evaluation, paths.items(), strict=True)
    }
    folder = expand_home(output, "mode.output")
    _check_output(folder, rows)
    claim_output(output, "mode.output")
    filters = Filters(
        folder=folder / WORK,
        text_field=source.text_field,
        domain_field=source.domain_field,
        rules=rules,
        disabled_rules=disabled_rules,
        evaluation=_make_evaluation(sets, min_coverage=min_coverage, num_words=evaluation_words),
        hasher=None if near_copies is None else BandHasher(*choose_bands(near_copies)),
    )
    copies = {"exact_copies": exact_copies, "near_copies": near_copies, "max_compared": max_compared}
    fields = {"text_field": source.text_field, "domain_field": source.domain_field}
    judged_by: dict[str, Any] = {"quality": rules, "disabled_rules": disabled_rules, "evaluation": sorted(evaluation)}
    judged_by |= {"min_coverage": min_coverage, "evaluation_words": evaluation_words}
    pipeline = Pipeline(
        output=folder,
        filters=filters,
        removes_exact=exact_copies,
        near_threshold=near_copies,
        max_compared=max_compared,
        shard_bytes=int(shard_mb * 1e6),
        settings=fields | judged_by | copies | {"shard_mb": shard_mb},
    )
    content = _hash_content([rows, *(sets[name] for name in sorted(sets))], resolved.cache_dir)
    return _run(pipeline, rows, content, num_processes or num_cores(), write_page)


def _run(pipeline: Pipeline, rows: Rows, content_hash: str, num_processes: int, write_page: Callable[..., None]) -> int:
    LOGGER.info(f"preparing {rows.name}, {format_bytes(rows.num_bytes)}")
    begun = time.monotonic()
    report = pipeline.run(rows, content_hash=content_hash, num_processes=num_processes)
    write_page(pipeline.output / PAGE, report)
    field, kinds_found = pipeline.filters.domain_field, {*report["domains"]} - {NO_DOMAIN}
    if field is not None and kinds_found == {UNKNOWN_DOMAIN}:
        LOGGER.warning(f"data.domain_field={field}: no document has a value there, so the kind of all is unknown")
    for kind in pipeline.filters.disabled_rules:
        if kind not in report["domains"]:
            kinds = ", ".join(report["domains"])
            LOGGER.warning(
                f"mode.disabled_rules.{kind}: no document is of this kind; by data.domain_field they are {kinds}"
            )
    for line in _summarize(report, pipeline.output, seconds=time.monotonic() - begun):
        LOGGER.info(line)
    return 0


def _check_output(folder: Path, rows: Rows) -> None:
    """Reject an output that the next start would read as input."""
    inside = [file for file in getattr(rows, "files", []) if file.resolve().is_relative_to(folder.resolve())]
    parent = Path(os.path.expanduser(rows.name))
    if inside or (parent.is_dir() and folder.resolve().is_relative_to(parent.resolve())):
        reason = f"it is inside the input, {rows.name}, or contains it"
        raise ConfigError(f"mode.output={folder}", reason, "mode.output=<a folder next to it>")


def _open_documents(resolved: ResolvedRun) -> tuple[Any, Rows]:
    """Return the source of the documents, and their rows."""
    source = resolved.make("data")
    if not hasattr(source, "open_rows"):
        raise ConfigError("mode=prepare data=…", "it reads documents as rows", "data=documents data.path=<files>")
    return source, source.open_rows()


def _make_evaluation(sets: Mapping[str, Rows], *, min_coverage: float, num_words: int) -> EvaluationSet | None:
    if not sets:
        return None
    items = _read_items(sets)
    return EvaluationSet(items, min_coverage=min_coverage, num_words=num_words, min_words=min(8, num_words))


def _hash_content(read: Sequence[Rows], cache_dir: str) -> str:
    """Return a hash of all input."""
    folder = open_cache_dir(cache_dir)
    joined = "\0".join(rows.content_hash(folder) for rows in read)
    return hashlib.blake2b(joined.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _check_disabled_rules(disabled_rules: Mapping[str, Any], rules: Mapping[str, Any]) -> None:
    for domain, names in disabled_rules.items():
        if names == "all":
            continue
        unknown = [name for name in names if name not in RULES] if isinstance(names, list) else [names]
        if unknown:
            reason = "it is a list of rules of quality=, or all"
            key = f"mode.disabled_rules.{domain}"
            near = [found for name in unknown for found in get_close_matches(str(name), RULES, 1)] or [*rules][:1]
            fix = f"{key}=all"
            if near:
                known = [name for name in names if name in RULES] if isinstance(names, list) else []
                fix = f"'{key}=[{','.join([*known, *near])}]', or {fix}"
            raise ConfigError(f"{key}={to_setting(names)}", reason, fix)


def _check_kinds(disabled_rules: Mapping[str, Any], domain_field: str | None) -> None:
    """Reject rules that are off for a kind of documents if no field says the kind."""
    kinds = [kind for kind in disabled_rules if kind != NO_DOMAIN]
    if kinds and domain_field is None:
        reason = "which documents are of this kind is unknown without the field that says it"
        fix = f"data.domain_field=<field whose value is {kinds[0]}>, or 'mode.disabled_rules={{}}'"
        raise ConfigError(f"mode.disabled_rules.{kinds[0]}={to_setting(disabled_rules[kinds[0]])}", reason, fix)


def _read_items(sets: Mapping[str, Rows]) -> Iterator[tuple[str, str]]:
    """Yield every evaluation item: all text of a row, or a line of a text file."""
    for name, rows in sets.items():
        for row in rows:
            fields = row.parse()
            if list(fields) == ["text"] and "\n" in str(fields["text"]).strip():
                for number, line in enumerate(str(fields["text"]).splitlines(), start=1):
                    yield f"{name}: {row.place} line {number}", line
            else:
                yield f"{name}: {row.place}", "\n".join(_texts(fields))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)


def _summarize(report: Mapping[str, Any], folder: Path, *, seconds: float) -> Iterator[str]:
    rate = report["bytes"] / max(seconds, 1e-3)
    yield (
        f"{report['kept']:,} of {count(report['documents'], 'document')} kept,"
        f" {format_bytes(report['kept_bytes'])} of {format_bytes(report['bytes'])} ({format_bytes(rate)}/s)"
    )
    for reason, number in report["dropped"].items():
        yield f"dropped: {describe_dropped(reason, number)}"
    if (near := report["near_copies"]) and near["not_compared"]:
        pairs = count(near["not_compared"], "pair that may be a near copy was", "pairs that may be near copies were")
        yield f"{pairs} not compared: mode.max_compared"
    if evaluation := report["evaluation"]:
        yield (
            f"of {count(evaluation['items'], 'evaluation item')}, {evaluation['found']:,} found in documents,"
            f" {evaluation['found_in_part']:,} in part; {evaluation['too_short']:,} too short to search for"
        )
    field = report["settings"]["text_field"]
    named = "" if field == TEXT_FIELD else f" {type_setting('data.text_field', field)}"
    path = type_setting("data.path", folder / DOCUMENTS)
    yield f"{folder / PAGE}; train on them: data=documents {path}{named}"
