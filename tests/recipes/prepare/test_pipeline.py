"""Documents through the whole of mode=prepare: what stays, what is counted, and the same bytes however it is run."""

import datetime
import decimal
import json
import math
import pydoc_data.topics
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, execute, read_metrics

from recipes.config import compose_and_check
from recipes.config.overrides import parse_override
from recipes.entry.run import run_resolved
from recipes.errors import ConfigError
from recipes.mode.prepare import _summarize
from recipes.prepare import chunk as chunk_module
from recipes.prepare import pipeline as pipeline_module
from recipes.prepare.minhash import shingles
from recipes.prepare.near_duplicates import jaccard
from recipes.prepare.survivors import cut_shards
from recipes.runtime import lock

WORDS = sorted({word for text in pydoc_data.topics.topics.values() for word in text.split() if word.isalpha()})


def make_text(rng: random.Random, num_words: int = 120) -> str:
    """Return sentences of ten words each."""
    sentences = [f"The {' '.join(rng.choices(WORDS, k=8))} and." for _ in range(num_words // 10)]
    return " ".join(sentences)


def change_words(text: str, rng: random.Random, share: float) -> str:
    words = text.split()
    for index in rng.sample(range(len(words)), round(len(words) * share)):
        words[index] = rng.choice(WORDS)
    return " ".join(words)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def prepare(source: Path, output: Path, *overrides: str) -> dict[str, Any]:
    """Run the mode in this process and return its report."""
    settings = [f"data.path={source}", f"mode.output={output}", "mode.num_processes=1", *overrides]
    assert execute("mode=prepare", "data=documents", *settings) == 0
    report: dict[str, Any] = json.loads((output / "report.json").read_text())
    return report


def kept_rows(output: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted((output / "documents").iterdir()) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def all_bytes(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Write documents of two kinds, with copies, spam, rows that cannot be read and part of an evaluation set."""
    rng = random.Random(0)
    prose = [{"text": make_text(rng), "kind": "prose", "id": index} for index in range(60)]
    code = [{"text": f"def f_{i}(x): {{return x}} " * 20, "kind": "code", "id": 100 + i} for i in range(5)]
    question = make_text(rng, 30)
    write_rows(tmp_path / "questions.jsonl", [{"question": question, "choices": ["yes", "no"]}])
    rows: list[Any] = [*prose, *code, dict(prose[3], id=200), {"text": "buy now " * 80, "kind": "prose", "id": 201}]
    rows += [{"text": f"{make_text(rng)} {question} {make_text(rng)}", "kind": "prose", "id": 202}]
    rows += ["{broken\n", {"body": "no text", "id": 203}, {"text": None, "id": 204}, {"text": " \n", "id": 205}]
    rows += ['{"text": "half \\ud800", "id": 206}\n', "3\n"]
    write_rows(tmp_path / "raw" / "a.jsonl", rows[:40])
    write_rows(tmp_path / "raw" / "b.jsonl", rows[40:])
    return tmp_path


OPTIONS = (
    "data.domain_field=kind",
    "quality=[gopher,c4]",
    "quality.remove_unpunctuated_lines=null",
    "mode.disabled_rules={code: all}",
)


def test_each_document_is_counted_once_with_the_first_reason(mixed: Path) -> None:
    evaluation = f"mode.evaluation={{mine: {mixed / 'questions.jsonl'}}}"
    report = prepare(mixed / "raw", mixed / "out", *OPTIONS, evaluation)
    assert report["dropped"] == {
        "contaminated": 1,
        "empty": 1,
        "exact copy": 1,
        "near copy": 4,
        "quality": 1,
        "unreadable": 5,
    }
    assert report["documents"] == 74 == report["kept"] + sum(report["dropped"].values())
    ids = [row["id"] for row in kept_rows(mixed / "out")]
    assert ids == [*range(60), 100], "in their order; four of five functions are near copies of the first"
    assert [(row["place"], row["reason"]) for row in report["unreadable"]] == [
        ("b.jsonl:29", "invalid JSON: Expecting property name enclosed in double quotes, column 2"),
        ("b.jsonl:30", "it has no field text; its fields are body, id"),
        ("b.jsonl:31", "its field text is null, not text"),
        ("b.jsonl:33", "it has \\ud800, half of a surrogate pair, which is no character"),
        ("b.jsonl:34", "a row has named fields, and this one is 3"),
    ]
    assert report["domains"]["code"]["kept"] == 1, "no rule holds for it"
    rule = next(rule for rule in report["rules"] if rule["rule"] == "max_top_2gram_characters")
    assert (rule["failed"], rule["domains"]) == (1, {"prose": 1})
    assert rule["examples"][0]["text"].startswith("buy now")
    assert report["evaluation"]["found"] == 1
    assert report["evaluation"]["documents"][0]["item"] == "mine: questions.jsonl:1"
    page = (mixed / "out" / "report.html").read_text()
    for shown in ("61 of 74 documents kept", "buy now buy now", "b.jsonl:29", "mine: questions.jsonl:1"):
        assert shown in page


def test_rows_keep_their_fields_and_lose_the_lines_that_rules_remove(tmp_path: Path) -> None:
    text = "A first line that is long enough.\nMenu\nAnother line that ends as it should.\n"
    source = write_rows(tmp_path / "a.jsonl", [{"id": 7, "body": text, "tags": ["ä"]}])
    more = ("data.text_field=body", "quality.remove_unpunctuated_lines=true", "mode.near_copies=null")
    report = prepare(source, tmp_path / "out", "quality=c4", "quality.min_sentences=null", *more)
    cleaned = text.replace("Menu\n", "")
    assert kept_rows(tmp_path / "out") == [{"id": 7, "body": cleaned, "tags": ["ä"]}]
    assert {rule["rule"]: rule["lines"] for rule in report["rules"] if rule.get("lines")} == {
        "remove_unpunctuated_lines": 1
    }


def test_fields_that_json_lacks_are_kept_as_json(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    text = make_text(random.Random(8))
    fields = {
        "text": [text.encode()],
        "utf8": ["ä".encode()],
        "other": [b"\0\xff"],
        "scores": [[0.5, math.nan, math.inf]],
        "nested": [{"at": datetime.datetime(2026, 1, 2, 3, 4), "cost": decimal.Decimal("1.50")}],
        "kind": [None],
    }
    parquet.write_table(pyarrow.table(fields), tmp_path / "a.parquet")
    report = prepare(tmp_path / "a.parquet", tmp_path / "out", "data.domain_field=kind", "mode.near_copies=null")
    [line] = [path.read_bytes() for path in (tmp_path / "out" / "documents").iterdir()]
    assert json.loads(line, parse_constant=pytest.fail) == {
        "text": text,
        "utf8": "ä",
        "other": "AP8=",
        "scores": [0.5, None, None],
        "nested": {"at": "2026-01-02 03:04:00", "cost": "1.50"},
        "kind": None,
    }
    assert list(report["domains"]) == ["unknown"]


@pytest.mark.parametrize("num_processes", [2, 3])
def test_any_number_of_processes_writes_the_same_bytes(
    num_processes: int, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "_CHUNK_ROWS", 7)
    prepare(mixed / "raw", mixed / "one", *OPTIONS)
    prepare(mixed / "raw", mixed / "more", *OPTIONS, f"mode.num_processes={num_processes}")
    assert all_bytes(mixed / "one") == all_bytes(mixed / "more")


def test_planted_near_copies_are_found_and_none_below_the_threshold(tmp_path: Path) -> None:
    rng = random.Random(1)
    originals = [make_text(rng, 300) for _ in range(200)]
    copies = [change_words(text, rng, 0.02) for text in originals]
    others = [change_words(text, rng, 0.3) for text in originals]
    rows = [{"text": text, "id": index} for index, text in enumerate([*originals, *copies, *others])]
    report = prepare(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", "mode.near_copies=0.7")
    stay = {row["id"] for row in kept_rows(tmp_path / "out")}
    similarity = [jaccard(shingles(text), shingles(copy)) for text, copy in zip(originals, copies, strict=True)]
    planted = [200 + index for index, value in enumerate(similarity) if value >= 0.7]
    assert len(planted) > 150
    found = [index for index in planted if index not in stay]
    assert len(found) >= 0.95 * len(planted)
    assert stay >= {*range(200), *range(400, 600)}, "originals, and texts that are too different, stay"
    assert {200 + index for index, value in enumerate(similarity) if value < 0.7} <= stay
    assert all(group["lowest_similarity"] >= 0.7 for group in report["largest_copies"])


def test_a_clean_corpus_loses_nothing_to_an_evaluation_set(tmp_path: Path) -> None:
    rows = [{"text": text} for text in pydoc_data.topics.topics.values()]
    rng = random.Random(2)
    questions = write_rows(tmp_path / "questions.jsonl", [{"text": make_text(rng, 40)} for _ in range(100)])
    evaluation = f"mode.evaluation={{mine: {questions}}}"
    more = ("mode.near_copies=null", "mode.exact_copies=false")  # two topics are equal
    report = prepare(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", evaluation, *more)
    assert report["kept"] == report["documents"] == len(rows)
    assert report["evaluation"] | {"documents": []} == {
        "items": 100,
        "too_short": 0,
        "boilerplate": 0,
        "found": 0,
        "found_in_part": 0,
        "documents": [],
    }


def test_each_line_of_a_text_file_is_an_item(tmp_path: Path) -> None:
    rng = random.Random(3)
    items = [make_text(rng, 20) for _ in range(3)]
    (tmp_path / "items.txt").write_text("\n".join(items))
    rows = [{"text": make_text(rng)}, {"text": f"{make_text(rng)} {items[1]}"}]
    evaluation = f"mode.evaluation={{mine: {tmp_path / 'items.txt'}}}"
    report = prepare(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", evaluation)
    assert [hit["item"] for hit in report["evaluation"]["documents"]] == ["mine: items.txt line 2"]


def test_a_preparation_that_failed_half_way_goes_on_and_judges_no_chunk_twice(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "_CHUNK_ROWS", 7)
    prepare(mixed / "raw", mixed / "whole", *OPTIONS)
    judged: list[int] = []
    judge = pipeline_module.judge_chunk

    def judge_or_fail(chunk: Any, *, filters: Any) -> None:
        if len(judged) == 4:
            raise OSError("no space left on device")
        judged.append(chunk.number)
        judge(chunk, filters=filters)

    monkeypatch.setattr(pipeline_module, "judge_chunk", judge_or_fail)
    settings = [f"data.path={mixed / 'raw'}", f"mode.output={mixed / 'parts'}", "mode.num_processes=1", *OPTIONS]
    assert execute("mode=prepare", "data=documents", *settings) == 1
    assert not (mixed / "parts" / "report.json").exists()
    again: list[int] = []
    monkeypatch.setattr(
        pipeline_module,
        "judge_chunk",
        lambda chunk, filters: (again.append(chunk.number), judge(chunk, filters=filters)),
    )
    prepare(mixed / "raw", mixed / "parts", *OPTIONS)
    assert judged == [0, 1, 2, 3]
    assert again == [*range(4, 11)]
    assert all_bytes(mixed / "parts") == all_bytes(mixed / "whole")


def _texts(rng: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(2000):
        yield {"text": make_text(rng, 1500)}


def test_a_killed_preparation_writes_the_same_bytes_when_it_is_started_again(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", list(_texts(random.Random(4))))
    more = ["mode=prepare", "data=documents", f"data.path={source}", "quality=gopher", "mode.num_processes=2"]
    command = [sys.executable, str(ROOT / "train.py"), *more, f"mode.output={tmp_path / 'killed'}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    work = tmp_path / "killed" / "unfinished"
    deadline = time.monotonic() + 60
    while not list(work.glob("*.npz")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_judged = len(list(work.glob("*.npz")))
    assert 1 <= num_judged < 5, "killed between two chunks"
    prepare(source, tmp_path / "killed", "quality=gopher", "mode.num_processes=2")
    prepare(source, tmp_path / "whole", "quality=gopher")
    assert all_bytes(tmp_path / "killed") == all_bytes(tmp_path / "whole")


def test_a_second_start_reads_the_report_and_other_settings_need_another_folder(mixed: Path) -> None:
    first = prepare(mixed / "raw", mixed / "out", *OPTIONS)
    shutil.copytree(mixed / "raw", mixed / "moved")
    assert prepare(mixed / "moved", mixed / "out", *OPTIONS, "mode.num_processes=2") == first
    assert mistake(mixed / "raw", mixed / "out", *OPTIONS, "mode.near_copies=0.9").startswith(
        f"mode.output={mixed / 'out'}: it contains documents from a different input or settings"
    )


def mistake(source: Path, output: Path, *overrides: str) -> str:
    """Return the mistake that a preparation ends with."""
    settings = ["mode=prepare", "data=documents", f"data.path={source}", f"mode.output={output}", *overrides]
    composed, mistakes = compose_and_check(settings)
    if mistakes:
        return str(mistakes[0])
    assert composed is not None
    from recipes.build import execute as execute_mode

    with pytest.raises(ConfigError) as error:
        execute_mode(composed)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["+quality.min_wrds=3"], "quality.min_wrds=3: there is no such rule; type quality.min_words=3"),
        (["quality.min_wrds=3"], "quality.min_wrds=3: there is no such rule; type quality.min_words=3"),
        (
            ["mode.disabled_rules={code: [min_wrds]}"],
            "mode.disabled_rules.code=[min_wrds]: it is a list of rules of quality=, or all;"
            " type 'mode.disabled_rules.code=[min_words]', or mode.disabled_rules.code=all",
        ),
        (["mode.near_copies=1.5"], "mode.near_copies=1.5: it must be above 0 and at most 1"),
        (["mode.evaluation={x: nowhere.jsonl}"], "mode.evaluation.x=nowhere.jsonl: there is no such file or folder"),
        (
            ["data.text_field=body"],
            "the only document was dropped: 1 unreadable; the first: it has no field body; its fields are text;"
            " type data.text_field=<the field of the text>, or data.path=<documents>",
        ),
        (
            ["quality=gopher", "quality.min_words=500"],
            "quality.min_words=500: the only document was dropped: 1 quality; type quality.min_words=null, or data.",
        ),
        (
            ["mode.disabled_rules={code: all}"],
            "mode.disabled_rules.code=all: which documents are of this kind is unknown without the field that says it;"
            " type data.domain_field=<field whose value is code>",
        ),
        (
            ["mode.evaluation={mine: SOURCE}"],
            "mode.evaluation={mine: …}: the only document was dropped: 1 contaminated; type 'mode.evaluation={}'",
        ),
        (["data=stdlib_text", "~data.path"], "it reads documents as rows; type data=documents"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_no_folder(overrides: list[str], expected: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": make_text(random.Random(5), 60)}])
    overrides = [override.replace("SOURCE", str(source)) for override in overrides if override != "~data.path"]
    if "data=stdlib_text" in overrides:
        composed, _ = compose_and_check(["mode=prepare", *overrides, f"mode.output={tmp_path / 'out'}"])
        assert composed is not None
        assert run_resolved(composed) == 2
        return
    assert expected in mistake(source, tmp_path / "out", *overrides)
    assert not list((tmp_path / "out").glob("**/*.*"))


def test_no_document_is_a_sentence_and_a_kind_that_no_document_has_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "there is no document to prepare" in mistake(write_rows(tmp_path / "none.jsonl", []), tmp_path / "out")
    source = write_rows(tmp_path / "a.jsonl", [{"text": make_text(random.Random(7)), "kind": "prose"}])
    prepare(source, tmp_path / "out", "data.domain_field=knid", "mode.disabled_rules={prose: all}")
    out, err = capfd.readouterr()
    shown = out + err
    assert "mode.disabled_rules.prose: no document is of this kind; by data.domain_field they are unknown" in shown
    assert "data.domain_field=knid: no document has a value there, so the kind of all is unknown" in shown


def test_a_folder_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "word " * 60}])
    write_rows(tmp_path / "out" / "mine.txt", ["precious\n"])
    assert "the folder is not empty" in mistake(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "mine.txt"]


def test_what_is_written_is_never_read(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "raw" / "a.jsonl", [{"text": "word " * 60}])
    for path, output in ((source.parent, source.parent / "out"), (source, source.parent), (source, tmp_path)):
        assert "it is inside the input" in mistake(path, output)
    assert list(source.parent.iterdir()) == [source]


def test_two_preparations_do_not_write_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": make_text(random.Random(6))}])
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.1)
    work = tmp_path / "out" / "unfinished"
    work.mkdir(parents=True)
    holder = "import sys; from pathlib import Path; from recipes.runtime.lock import lock_run_folder\n"
    holder += f"with lock_run_folder(Path({str(work)!r})): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert "another process is using this folder" in mistake(source, tmp_path / "out")
        other.kill()
    prepare(source, tmp_path / "out")


def test_files_are_cut_before_they_grow_too_large() -> None:
    assert cut_shards([3, 3, 3, 10, 1, 1], 6) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert cut_shards([], 6) == []


def test_prepared_documents_are_trained_on(mixed: Path) -> None:
    prepare(mixed / "raw", mixed / "out", *OPTIONS, "mode.shard_mb=0.02")
    assert len(list((mixed / "out" / "documents").iterdir())) > 2
    tiny = [
        "tokenizer=bytes",
        "model.vocab_size=257",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.hidden_size=16",
    ]
    tiny += ["model.max_seq_len=32", "global_batch_size=8", "callbacks=[]", "trainer.max_steps=2", "eval_every=2"]
    folder = mixed / "run"
    assert execute("data=documents", f"data.path={mixed / 'out' / 'documents'}", *tiny, f"hydra.run.dir={folder}") == 0
    assert read_metrics(folder)[-1]["val/loss"] < 6.0


def test_the_last_line_is_typed_as_it_stands() -> None:
    counts = {"kept": 1, "documents": 2, "kept_bytes": 12, "bytes": 3400, "dropped": {}}
    report = counts | {"near_copies": None, "evaluation": None, "settings": {"text_field": "raw text"}}
    first, last = _summarize(report, Path("my out (1)"), seconds=1.0)
    assert "12 bytes of 3.4 kB (3.4 kB/s)" in first
    [_, path, field] = shlex.split(last.partition("train on them: ")[2])
    assert parse_override(path).value() == "my out (1)/documents"
    assert parse_override(field).value() == "raw text"
