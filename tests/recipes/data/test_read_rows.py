"""Rows of files, in order, each with a place that an error can name."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.data.read_rows import Row, open_rows
from recipes.errors import ConfigError

ROWS = [{"prompt": "1", "completion": "2"}, {"prompt": "ä", "completion": "ö"}]


def read(path: Path | str) -> list[Row]:
    return list(open_rows(str(path), setting="data.path", hub_split="train"))


def write_lines(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.txt"])
def test_lines_are_rows(name: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / name)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    rows = read(path)
    assert [row.parse() for row in rows] == ROWS
    assert [row.place for row in rows] == [f"{name}:1", f"{name}:2"]


@pytest.mark.parametrize("text", ["%s", "\n  %s\n", "\ufeff%s"], ids=["plain", "with blank lines", "with a BOM"])
def test_a_list_is_read_whole(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text % json.dumps(ROWS, indent=1), encoding="utf-8")
    assert [row.parse() for row in read(path)] == ROWS
    assert read(path)[1].place == "a.json item 2"


def test_blank_lines_and_a_bom_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n   \n{"a": 2}', encoding="utf-8")
    assert [(row.place, row.parse()["a"]) for row in read(path)] == [("a.jsonl:1", 1), ("a.jsonl:4", 2)]


def test_a_folder_is_read_by_suffix_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/c.jsonl", "notes.txt"):
        write_lines(tmp_path / name, ROWS[:1])
    assert [row.place for row in read(tmp_path)] == ["a/c.jsonl:1", "b.jsonl:1"]
    assert [row.place for row in read(tmp_path / "*.txt")] == ["notes.txt:1"]


def test_content_decides_the_hash_and_the_folder_does_not(tmp_path: Path) -> None:
    first, second = write_lines(tmp_path / "one" / "a.jsonl"), write_lines(tmp_path / "two" / "a.jsonl")
    hashes = [open_rows(str(p), setting="data.path", hub_split="").content_hash(tmp_path) for p in (first, second)]
    assert hashes[0] == hashes[1]
    write_lines(second, ROWS[:1])
    assert open_rows(str(second), setting="data.path", hub_split="").content_hash(tmp_path) != hashes[0]


def test_parquet_files_are_read(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [row.parse() for row in read(tmp_path)] == ROWS
    assert read(tmp_path)[1].place == "a.parquet row 2"
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(ConfigError, match="it is not a valid parquet file"):
        read(tmp_path)


def test_saved_data_sets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    rows = read(f"hf://{tmp_path}/saved")
    assert [row.parse() for row in rows] == ROWS
    assert rows[1].place.endswith("saved row 2")
    with pytest.raises(ConfigError, match="datasets says: "):
        read(f"hf://{tmp_path}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": 1,}\n', "a.jsonl:2: invalid JSON: .*column 9"),
        ('{"a": 1}\n["x"]\n', "a.jsonl:2: a row has named fields, and this one is .*x"),
        ("\x00\n", "a.jsonl:1: invalid JSON"),
        ("[1, 2", "a.jsonl:1: invalid JSON"),
        ("[1, 2]", "a.jsonl item 1: a row has named fields, and this one is 1"),
    ],
)
def test_a_broken_row_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        [row.parse() for row in read(path)]


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(ConfigError, match="a.jsonl:2: invalid JSON"):
        [row.parse() for row in read(tmp_path)]


@pytest.mark.parametrize(
    ("path", "reason"),
    [("missing.jsonl", "there is no such file or folder"), ("*.jsonl", "no file matches"), (".", "the folder has no")],
)
def test_nothing_to_read_is_named(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path / path)


def test_a_cut_gz_file_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS * 1000)
    packed = gzip.compress((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ConfigError, match="a.jsonl.gz: it cannot be read"):
        read(tmp_path / "a.jsonl.gz")


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl")
    rows = iter(open_rows(str(path), setting="data.path", hub_split=""))
    next(rows)
    write_lines(path, ROWS * 3)
    with pytest.raises(ConfigError, match="changed while it was being read"):
        list(rows)


def test_nesting_beyond_what_json_reads_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": ' + "[" * 200_000 + "\n")
    with pytest.raises(ConfigError, match="a.jsonl:1: invalid JSON"):
        [row.parse() for row in read(tmp_path)]


@pytest.mark.parametrize("damage", [lambda data: data[:40] + b"\0" * 40 + data[80:], lambda data: b"no gzip"])
def test_a_damaged_gz_file_is_named(damage: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS * 1000)
    (tmp_path / "b.jsonl.gz").write_bytes(damage(gzip.compress((tmp_path / "a.jsonl").read_bytes())))
    with pytest.raises(ConfigError, match="b.jsonl.gz: it cannot be read: (?!None)"):
        read(tmp_path / "b.jsonl.gz")


def test_half_of_a_surrogate_pair_is_named_and_a_pair_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00 \\\\ud800"}\n{"text": "cut \\ud83d"}\n')
    first, second = open_rows(str(path), setting="data.path", hub_split="train")
    assert first.parse() == {"text": "\U0001f600 \\ud800"}
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: it has \\ud83d, half of a surrogate pair"):
        second.parse()
