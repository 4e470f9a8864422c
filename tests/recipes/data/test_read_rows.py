"""Rows of files, in order, each with a place that an error can name."""

import bz2
import gzip
import io
import json
import logging
import lzma
import os
import shlex
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typed_remedies import run_command

from recipes.config.overrides import parse_override
from recipes.data import read_rows, unpacked
from recipes.data.documents.source import Documents
from recipes.data.read_rows import FileRows, Row, open_rows
from recipes.errors import ConfigError, format_report
from recipes.tokenizer.bytes import Bytes

ROWS = [{"prompt": "1", "completion": "2"}, {"prompt": "ä", "completion": "ö"}]


def read(path: Path | str) -> list[Row]:
    return list(open_rows(str(path), setting="data.path", split="train"))


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
    hashes = [open_rows(str(p), setting="data.path", split="").content_hash(tmp_path) for p in (first, second)]
    assert hashes[0] == hashes[1]
    write_lines(second, ROWS[:1])
    assert open_rows(str(second), setting="data.path", split="").content_hash(tmp_path) != hashes[0]


def test_parquet_files_are_read(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [row.parse() for row in read(tmp_path)] == ROWS
    assert read(tmp_path)[1].place == "a.parquet row 2"
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(ConfigError, match="a.parquet cannot be read: ArrowInvalid: "):
        read(tmp_path)


def test_saved_data_sets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    rows = read(f"hf://{tmp_path}/saved")
    assert [row.parse() for row in rows] == ROWS
    assert rows[1].place.endswith("saved row 2")


def save_splits(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(folder / "dict"))
    rows.save_to_disk(str(folder / "one"))
    return folder


@pytest.mark.parametrize(
    ("damage", "name", "split", "message"),
    [
        (None, "dict", "validation", "split=validation: hf://.*dict has the splits train, test; type data.split"),
        (None, "dict", "train+test", r"train, test, and is read by whole splits; type data.split=train or data"),
        (None, "dict", "train[:50%]", r"split=train\[:50%\]: .*read by whole splits; type data.split=train or"),
        (None, "one:default", "train", "one:default: .* has no configurations; type data.path=hf://.*/one$"),
        (
            None,
            "",
            "train",
            "saved by datasets, and this folder is neither; type data.path=/.*, which",
        ),
        (
            "state.json",
            "one",
            "train",
            "has no state.json: it was saved or copied in part; type data.path=<another",
        ),
        (
            "*.arrow",
            "one",
            "train",
            "one cannot be read: (ArrowInvalid|OSError): .*type data.path=<another copy",
        ),
    ],
)
def test_what_is_wrong_with_a_saved_data_set_is_named(
    damage: str | None, name: str, split: str, message: str, tmp_path: Path
) -> None:
    save_splits(tmp_path)
    if damage == "state.json":
        (tmp_path / "one" / damage).unlink()
    elif damage is not None:
        [file] = (tmp_path / "one").glob(damage)
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ConfigError, match=message):
        list(open_rows(f"hf://{tmp_path / name}".rstrip("/"), setting="data.path", split=split))


@pytest.mark.parametrize("way", ["above", "absolute", "link", "split", "split link"])
def test_a_saved_data_set_reads_no_file_outside_of_its_folder(way: str, tmp_path: Path) -> None:
    [file] = save_splits(tmp_path).glob("one/*.arrow")
    train, data_set = tmp_path / "dict" / "train", f"hf://{tmp_path}/dict"
    [own] = train.glob("*.arrow")
    state, splits, split = train / "state.json", tmp_path / "dict" / "dataset_dict.json", "train"
    if way in ("above", "absolute"):
        name = f"../../one/{file.name}" if way == "above" else str(file)
        state.write_text(state.read_text().replace(own.name, name))
    elif way == "link":
        own.unlink()
        own.symlink_to(file)
    elif way == "split":
        splits.write_text('{"splits": ["train", "../one"]}')
        split = "../one"
    else:
        shutil.rmtree(train)
        train.symlink_to(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"outside of (it|the folder); type data.path=<another copy of the folder>"):
        open_rows(data_set, setting="data.path", split=split)


def test_a_saved_data_set_in_the_cache_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "123"
    for file in list(save_splits(tmp_path).glob("one/*")):
        target = tmp_path / "blobs" / f"hash of {file.name}"
        target.parent.mkdir(exist_ok=True)
        (snapshot / "one").mkdir(parents=True, exist_ok=True)
        file.rename(target)
        (snapshot / "one" / file.name).symlink_to(target)
    assert [row.parse() for row in read(f"hf://{snapshot}/one")] == ROWS


def test_the_hash_of_a_saved_data_set_is_that_of_its_rows(tmp_path: Path) -> None:
    [file] = save_splits(tmp_path).glob("one/*.arrow")

    def read_hash() -> str:
        return open_rows(f"hf://{tmp_path}/one", setting="data.path", split="train").content_hash(tmp_path)

    before = read_hash()
    file.write_bytes(file.read_bytes().replace("ä".encode(), "ë".encode()))  # the fingerprint in state.json stays
    assert read_hash() != before


def test_a_split_that_no_path_reads_is_rejected(tmp_path: Path) -> None:
    save_splits(tmp_path)
    dataset, one, files = f"hf://{tmp_path}/dict", f"hf://{tmp_path}/one", str(tmp_path / "a.jsonl")
    for accepted in ({"data.path": dataset}, {"data.path": files, "data.val_path": "hf://org/name"}):
        read_rows.check_split("test", accepted)
    read_rows.check_split("train", {"data.path": files})
    for path, reason in ((files, "only a path that begins with hf:// has splits"), (one, "was saved without splits")):
        with pytest.raises(ConfigError, match=f"data.path={path} data.split=test: .*{reason}, and all of .* read"):
            documents_of(path, tmp_path, split="test")
    with pytest.raises(ConfigError, match=f"type data.path={dataset} data.split=test$"):
        documents_of(tmp_path / "dict", tmp_path, split="test")
    options = {"split_setting": "mode.evaluation_split", "default": "test"}
    with pytest.raises(ConfigError, match="mode.evaluation.b=b.jsonl mode.evaluation_split=dev: .*, without mode.eval"):
        read_rows.check_split("dev", {"mode.evaluation.b": "b.jsonl"}, **options)


@pytest.mark.parametrize("kind", ["feather", "file", "stream"])
def test_arrow_files_are_read(kind: str, tmp_path: Path) -> None:
    pyarrow, feather = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.feather"))
    table = pyarrow.Table.from_pylist(ROWS * 700)
    path = tmp_path / ("a.feather" if kind == "feather" else "a.arrow")
    if kind == "feather":
        feather.write_feather(table, path)
    else:
        with (pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream)(str(path), table.schema) as writer:
            writer.write_table(table)
    rows = read(tmp_path if kind == "feather" else path)
    assert ([row.parse() for row in rows], rows[-1].place) == (ROWS * 700, f"{path.name} row 1400")
    rows = list(open_rows(str(path), setting="data.path", split="train", fields=["prompt"]))
    assert rows[1].parse() == {"prompt": "ä"}
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ConfigError, match="cannot be read: .*; type data.path=<another copy of the file>"):
        read(path)


def test_an_arrow_file_of_a_saved_data_set_is_not_read_alone(tmp_path: Path) -> None:
    [file] = save_splits(tmp_path).glob("one/*.arrow")
    with pytest.raises(ConfigError, match=f"chosen and ordered by state.json; type data.path=hf://{tmp_path}/one"):
        read(file)


def test_text_that_is_not_utf_8_in_a_table_is_bytes_of_its_row(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    texts = pyarrow.array([b"good", b"caf\xe9"]).view(pyarrow.string())
    turns = pyarrow.ListArray.from_arrays([0, 1, 2], pyarrow.StructArray.from_arrays([texts], ["content"]))
    table = pyarrow.table({"text": texts, "turns": turns, "coded": texts.dictionary_encode()})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [row.parse() for row in read(tmp_path)] == [
        {"text": "good", "turns": [{"content": "good"}], "coded": "good"},
        {"text": b"caf\xe9", "turns": [{"content": b"caf\xe9"}], "coded": b"caf\xe9"},
    ]
    with pytest.raises(ConfigError, match="a.parquet row 2: its field text has bytes that are not UTF-8 text"):
        documents_of(tmp_path / "a.parquet", tmp_path).prepare()


def test_a_page_with_another_checksum_is_named(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    table, path = pyarrow.table({"text": [f"Document {number}" for number in range(60)]}), tmp_path / "a.parquet"
    parquet.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    assert len(read(path)) == 60
    path.write_bytes(path.read_bytes().replace(b"Document 7", b"Dacument 7"))
    with pytest.raises(ConfigError, match=r"its column text cannot be read \(OSError: .*checksum"):
        documents_of(path, tmp_path).prepare()


def test_a_text_of_an_arrow_file_that_begins_outside_of_its_bytes_is_named(tmp_path: Path) -> None:
    pyarrow, feather = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.feather"))
    texts = [f"{number:09}" for number in range(60)]
    feather.write_feather(pyarrow.table({"text": texts}), tmp_path / "a.feather", compression="uncompressed")
    data = bytearray((tmp_path / "a.feather").read_bytes())
    offsets = data.index(struct.pack("<4i", 0, 9, 18, 27))
    data[offsets + 8 : offsets + 12] = struct.pack("<i", -(2**30))
    (tmp_path / "a.feather").write_bytes(data)
    with pytest.raises(ConfigError, match="a.feather cannot be read: ArrowInvalid: column text: .*; type data.path=<"):
        read(tmp_path / "a.feather")


def test_columns_of_one_name_and_damaged_pages_are_named(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    texts = pyarrow.array([f"{number:09}" * 9 for number in range(60)])
    parquet.write_table(pyarrow.Table.from_arrays([texts, texts], ["text", "text"]), tmp_path / "twice.parquet")
    with pytest.raises(ConfigError, match="it has 2 columns with the name text; type a copy of the file in which"):
        documents_of(tmp_path / "twice.parquet", tmp_path).prepare()
    file = tmp_path / "damaged.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), file, compression="snappy", use_dictionary=False)
    file.write_bytes(file.read_bytes()[:200] + bytes(60) + file.read_bytes()[260:])
    with pytest.raises(ConfigError, match=r"column text cannot be read \(.*\); type another copy of the file$"):
        documents_of(file, tmp_path).prepare()
    file.with_name("b.parquet.gz").write_bytes(gzip.compress(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"b.parquet.gz: it is compressed with gzip; type gunzip < "):
        read(tmp_path / "b.parquet.gz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": 1,}\n', "a.jsonl:2: invalid JSON: .*column 9"),
        ('{"a": 1}\n["x"]\n', "a.jsonl:2: a row has named fields, and this one is .*x"),
        ("\x00\n", "a.jsonl:1: invalid JSON"),
        ("[1, 2", "a.jsonl:1: invalid JSON"),
        ("[1, 2]", "a.jsonl item 1: a row has named fields, and this one is 1"),
        ('{"a": 1,\n', "^a.jsonl:1: invalid JSON"),
        ('{\n "data": [{"a": 1}]\n}\n', r"""several lines an object.*type jq -c '\."data"\[\]' < """),
        ('{\n "a": 1\n}\n{\n "a": 2\n}', r"a.jsonl: it is JSON of several lines an object.*type jq -c \. < "),
        ('{\n "a": [1]\n}', r"type jq -c \. < "),
        ('["x"]\n["y"]\n', "a.jsonl:1: it is a list, and more follows it.*one JSON object per line"),
        ('\n[{"a": 1}]\n{"a": 1}\n', "a.jsonl:2: it is a list, and more follows it"),
    ],
)
def test_a_broken_row_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        [row.parse() for row in read(path)]


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(ConfigError, match="a.jsonl:2: byte 8 of it is not UTF-8 text"):
        [row.parse() for row in read(tmp_path)]


@pytest.mark.parametrize(
    ("path", "reason"),
    [("missing.jsonl", "there is no such file or folder"), ("*.jsonl", "no file matches"), (".", "the folder has no")],
)
def test_nothing_to_read_is_named(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path / path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"version": 1, "data": [{"text": "a"}, {"text": "b"}]}, "its fields are version, data, and data is a list of"),
        ({"text": {"0": "a", "1": "b"}, "id": {"0": 1, "1": 2}}, "its field text holds the texts of all rows by num"),
    ],
)
def test_all_rows_in_one_object_become_rows_as_typed_in_the_error(content: Any, reason: str, tmp_path: Path) -> None:
    (tmp_path / "it's.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=reason) as caught:
        documents_of(tmp_path / "it's.json", tmp_path).prepare()
    if "jq" not in caught.value.fix or shutil.which("jq") is not None:
        run_command(caught.value.fix, new := tmp_path / "new.jsonl")
        assert [row.parse()["text"] for row in read(new)] == ["a", "b"]


def test_the_lines_of_a_json_text_sequence_are_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"\x1e{json.dumps(row)}\n" for row in ROWS))
    assert [row.parse() for row in read(tmp_path / "a.jsonl")] == ROWS


def test_the_folder_of_a_preparation_is_answered_with_that_of_its_documents(tmp_path: Path) -> None:
    write_lines(tmp_path / "out 1" / "documents" / "00000.jsonl")
    (tmp_path / "out 1" / "report.json").write_text('{\n "input": "0123"\n}')
    with pytest.raises(ConfigError, match="mode=prepare wrote it") as caught:
        read(tmp_path / "out 1")
    assert caught.value.fix == f"\"data.path='{tmp_path}/out 1/documents'\""
    with pytest.raises(ConfigError, match="{…,…} is not expanded"):
        read(tmp_path / "{a,b}.jsonl")


def test_a_field_of_any_name_is_typed_as_the_error_says(tmp_path: Path) -> None:
    for name in ("raw text", "a=b, {c}", "it's", "7"):
        write_lines(tmp_path / "a.jsonl", [{name: f"text {number}"} for number in range(20)])
        with pytest.raises(ConfigError, match="it has no field text") as caught:
            documents_of(tmp_path / "a.jsonl", tmp_path).prepare()
        [typed] = shlex.split(caught.value.fix.partition(", or ")[0])
        assert parse_override(typed).value() == name


def test_a_cut_gz_file_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS * 1000)
    packed = gzip.compress((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ConfigError, match="a.jsonl.gz cannot be read: EOFError"):
        read(tmp_path / "a.jsonl.gz")


def test_bytes_after_what_gzip_packed_are_named_and_zeros_are_padding(tmp_path: Path) -> None:
    packed = gzip.compress(write_lines(tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "a.jsonl.gz").write_bytes(packed + packed + bytes(512))
    assert len(read(tmp_path / "a.jsonl.gz")) == 2 * len(ROWS)
    (tmp_path / "a.jsonl.gz").write_bytes(packed + b"garbage")
    with pytest.raises(
        ConfigError, match="other bytes follow what is compressed with gzip.*; type gunzip < .*a.jsonl.gz > <new file>"
    ):
        read(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "content", "num_rows", "is_listed"),
    [
        ("a.txt", b'{"text": "x"}\n{"text": "y"}\n', 2, True),
        ("a.md", b'\xef\xbb\xbf\n{"id": 1, "text": "x"}', 1, True),
        ("a.txt.gz", gzip.compress(b'{"text": "x"}\n{"text": "y"}\n', mtime=0), 2, True),
        ("a.txt", b'{"text": "' + 5000 * b"x" + b'"}\n{"text": "y"}\n', 2, True),
        ("a.txt", b'{"other": "x"}\n{"other": "y"}\n', 2, True),
        ("a.txt", b'{"other": "x"}\nis how this document begins', 1, False),
        ("a.txt", b"{ this is no JSON }\n{ nor this }\n", 1, False),
        ("a.dat", b'{"text": "x"}\n{"text": "y"}\n', 2, False),
    ],
    ids=str,
)
def test_rows_in_a_file_with_the_name_of_a_text_are_rows_and_a_line_says_so(
    name: str, content: bytes, num_rows: int, is_listed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(content)
    rows = FileRows(str(tmp_path / name), setting="data.path", text_field="text")
    with caplog.at_level("INFO", logger="lightning_recipes"):
        assert rows.content_hash(tmp_path).endswith(" rows in texts") is is_listed
    assert ("1 text file holds JSON rows" in caplog.text) is is_listed
    assert len(list(rows)) == num_rows


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_the_description_of_a_saved_data_set_is_no_file_of_rows(name: str, tmp_path: Path) -> None:
    for file in ("state.json", "dataset_info.json"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=f"holds no rows; type data.path=hf://{tmp_path}$"):
        read(tmp_path / name)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl")
    rows = iter(open_rows(str(path), setting="data.path", split=""))
    next(rows)
    write_lines(path, ROWS * 3)
    with pytest.raises(ConfigError, match="changed while it was being read"):
        list(rows)


def test_nesting_beyond_what_json_reads_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": ' + "[" * 200_000 + "\n")
    with pytest.raises(ConfigError, match="a.jsonl:1: invalid JSON"):
        [row.parse() for row in read(tmp_path)]


@pytest.mark.parametrize("damage", [lambda data: data[:40] + b"\0" * 40 + data[80:], lambda data: b"\xffno gzip"])
def test_a_damaged_gz_file_is_named(damage: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS * 1000)
    (tmp_path / "b.jsonl.gz").write_bytes(damage(gzip.compress((tmp_path / "a.jsonl").read_bytes())))
    with pytest.raises(ConfigError, match="b.jsonl.gz cannot be read: "):
        read(tmp_path / "b.jsonl.gz")


def test_half_of_a_surrogate_pair_is_named_and_a_pair_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00 \\\\ud800"}\n{"text": "cut \\ud83d"}\n')
    first, second = open_rows(str(path), setting="data.path", split="train")
    assert first.parse() == {"text": "\U0001f600 \\ud800"}
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: it has \\ud83d, half of a surrogate pair"):
        second.parse()


def compress_zstd(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return b"".join(pyarrow.compress(part, codec="zstd", asbytes=True) for part in (data[:9], data[9:]))  # two frames


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": compress_zstd,
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_compressed_file_is_recognized_by_its_first_bytes_whatever_its_name(packing: str, tmp_path: Path) -> None:
    data = PACKINGS[packing](write_lines(tmp_path / "plain").read_bytes() * 500)
    (tmp_path / f"a.JSONL{packing}").write_bytes(data)
    (tmp_path / "b.json").write_bytes(data)
    assert [row.parse() for row in read(tmp_path)] == ROWS * 1000
    (tmp_path / "list.json").write_bytes(PACKINGS[packing](json.dumps(ROWS).encode()))
    assert [row.parse() for row in read(tmp_path / "list.json")] == ROWS


def test_a_folder_gives_no_hidden_and_unfinished_copies_and_the_log_counts_what_it_skips(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ("E.JSONL", "d.ndjson", "h.jsonlines", "i.jl", "sub/a.json")
    hidden = (".ipynb_checkpoints/a.jsonl", "__MACOSX/._a.jsonl", "._a.jsonl", "_temporary/0/a.jsonl", "_metadata.json")
    others = ("c.xml", "d.xml", "README", "dataset_info.json", "state.json")
    for name in (*kept, *hidden, *others):
        write_lines(tmp_path / name)
    (tmp_path / "again").symlink_to(tmp_path / "sub")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with caplog.at_level(logging.INFO, logger="lightning_recipes"):
        rows = read(tmp_path)
    assert [row.place for row in rows] == [f"{name}:{line}" for name in kept for line in (1, 2)]
    (line,) = caplog.messages
    assert line.startswith(f"data.path={tmp_path}: 5 files are read; skipped: 12 (3 hidden folders, ")
    for count in ("2 .xml", "2 hidden", "2 descriptions of a dataset", "1 link to a folder", "1 pipe or device"):
        assert count in line
    caplog.clear()
    read(tmp_path / "E.JSONL")
    assert not caplog.messages


def test_a_folder_that_datasets_has_saved_is_read_as_typed_in_the_error(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="skipped: 3") as caught:
        read(tmp_path / "saved")
    remedy = caught.value.fix.partition(",")[0]
    assert remedy == f"data.path=hf://{tmp_path}/saved"
    assert [row.parse() for row in read(remedy.removeprefix("data.path="))] == ROWS


def write_tar(rows: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO(rows))
    return file.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
JSON_LINE = json.dumps({"text": "a sentence"}) + "\n"


@pytest.mark.parametrize(
    ("content", "reason", "fix"),
    [
        (JSON_LINE.encode("utf-16"), "it is UTF-16 text", "iconv -f utf-16 -t utf-8"),
        (JSON_LINE.encode("utf-16-be") * 2, "it is UTF-16BE text", "iconv -f utf-16be -t utf-8"),
        (JSON_LINE.encode("utf-32"), "it is UTF-32 text", "iconv -f utf-32 -t utf-8"),
        (POINTER, "it is a Git LFS pointer", "git -C /"),
        (b"<!DOCTYPE html><html>Sign in</html>", "it is a web page", "data.path=<another copy>"),
        (b"PK\x03\x04" + bytes(60), "it is a zip archive", "data.path=<a file that is unpacked"),
        (b"PK\x03\x04" + bytes(26) + b"xl/workbook.xml", "it is a spreadsheet", "data.path=<its sheet as JSONL"),
        (b"PARE" + bytes(60), "it is a Parquet file that is encrypted", "data.path=<the same rows as "),
        (b"%PDF-1.7\n", "it is a PDF", "data.path=<its text as UTF-8"),
        (write_tar(JSON_LINE.encode()), "it is a tar archive", "data.path=<a file that is unpacked"),
    ],
)
def test_a_file_of_another_kind_is_named_with_the_command_that_converts_it(
    content: bytes, reason: str, fix: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.setting == f"data.path={path}"
    assert caught.value.reason.startswith(reason)
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize(
    ("suffix", "content", "fix"),
    [("lzma", lzma.compress(b"text", lzma.FORMAT_ALONE), "unlzma < "), ("Z", b"\x1f\x9d\x90text", "gunzip < ")],
)
def test_compression_that_only_the_name_shows_is_named(suffix: str, content: bytes, fix: str, tmp_path: Path) -> None:
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(content)
    with pytest.raises(ConfigError, match="it is compressed with ") as caught:
        read(tmp_path / f"a.jsonl.{suffix}")
    assert caught.value.fix.startswith(fix)


def test_what_is_advised_for_rows_of_another_kind_is_a_file_of_rows(tmp_path: Path) -> None:
    for content, fix in ((b"SQLite format 3\0", "data.path=<the same rows as "), (b"\x04\x22\x4d\x18", "unlz4 < ")):
        (tmp_path / "a").write_bytes(content + bytes(40))
        with pytest.raises(ConfigError) as caught:
            read(tmp_path / "a")
        assert caught.value.fix.startswith(fix)
    with pytest.raises(ConfigError, match=r"data.text_field=: it is empty, .*; type data.text_field=<name of a field>"):
        documents_of(tmp_path, tmp_path, text_field="")


@pytest.mark.parametrize("byte", [b"0", b"\n", b" ", b"["])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_file_that_unpacks_to_far_more_than_it_holds_is_rejected(
    packing: str, byte: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked, "_MIN_BYTES_TO_LIMIT", 1000)
    monkeypatch.setattr(unpacked, "_BUFFER_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(PACKINGS[packing](byte * 300_000))
    with pytest.raises(ConfigError, match="it unpacks to more than"):
        [row.parse() for row in read(path)]


def test_a_line_or_a_list_that_no_memory_holds_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_rows, "_MAX_LINE_BYTES", 40)
    write_lines(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "2" * 40}])
    with pytest.raises(ConfigError, match="a.jsonl:2: a line of it is longer than 40 bytes"):
        read(tmp_path / "a.jsonl")

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    (tmp_path / "a.json").write_text("[1]")
    monkeypatch.setattr(read_rows, "_parse_json", fail)
    with pytest.raises(ConfigError, match="it does not fit into memory: a JSON list .* are read whole"):
        read(tmp_path / "a.json")


def test_what_utf_8_forbids_is_named_in_bytes_and_in_lists_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xed\xa0\x80"}\n')
    with pytest.raises(ConfigError, match="a.jsonl:1: byte 11 of it is not UTF-8 text"):
        [row.parse() for row in read(tmp_path / "a.jsonl")]
    (tmp_path / "a.json").write_text('[{"text": "whole"}, {"text": "\\ud83d"}]')
    with pytest.raises(ConfigError, match="a.json item 2: it has .ud83d, half of a surrogate pair"):
        [row.parse() for row in read(tmp_path / "a.json")]


def documents_of(path: Path | str, folder: Path, split: str = "train", text_field: str = "text") -> Documents:
    settings: Any = {"tokenizer": Bytes(), "seq_len": 4, "val_fraction": 0.3, "cache_dir": str(folder / "cache")}
    return Documents(path=str(path), text_field=text_field, domain_field=None, split=split, **settings)


def tokens_of(source: Documents) -> list[int]:
    return sorted(int(token) for split in ("train", "val") for token in source.cache.path(split).read_bytes()[::2])


def test_only_columns_that_are_needed_are_read_and_dates_beyond_those_of_python_are_text(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    far = pyarrow.array([2**59, 5] * 10, pyarrow.timestamp("us"))
    nested = pyarrow.StructArray.from_arrays([far], ["at"])
    texts = [f"document {number}" for number in range(20)]
    table = pyarrow.table({"text": texts, "far": far, "nested": nested})
    parquet.write_table(table, tmp_path / "a.parquet")
    parquet.write_table(table.drop_columns(["nested"]), tmp_path / "b.parquet")
    source = documents_of(tmp_path / "a.parquet", tmp_path)
    source.prepare()
    assert source.cache.meta.num_documents == 20
    shown = [row.parse()["far"] for row in read(tmp_path / "b.parquet")[:2]]
    assert shown == ["20237-04-25 10:45:03.423488", "1970-01-01 00:00:00.000005"]
    with pytest.raises(ConfigError, match=r"a\.parquet: its column nested cannot be read \(OverflowError"):
        read(tmp_path / "a.parquet")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(str(tmp_path / "saved"))
    rows = open_rows(f"hf://{tmp_path}/saved", setting="data.path", split="train", fields=["text"])
    assert [row.parse() for row in rows] == [{"text": text} for text in texts]


def test_text_that_parquet_holds_as_bytes_is_text_and_the_advice_names_other_fields(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    texts = [f"document ä {number}" for number in range(20)]
    parquet.write_table(pyarrow.table({"text": [text.encode() for text in texts]}), tmp_path / "bytes.parquet")
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "text.parquet")
    as_bytes, as_text = (documents_of(tmp_path / f"{name}.parquet", tmp_path) for name in ("bytes", "text"))
    as_bytes.prepare()
    as_text.prepare()
    assert tokens_of(as_bytes) == tokens_of(as_text)
    for rows, reason, fix in (
        ({"text": [b"\xff"], "body": ["a"]}, "bytes that are not UTF-8", 'python -c "import functools, pandas, sys; '),
        ({"text": [None], "body": ["a"]}, "is null, not text; it is the only row", "data.text_field=body, or "),
        ({"txt": ["a"], "id": [1]}, "it has no field text; its fields are txt, id", "data.text_field=txt, or "),
    ):
        parquet.write_table(pyarrow.table(rows), tmp_path / "wrong.parquet")
        with pytest.raises(ConfigError, match=reason) as caught:
            documents_of(tmp_path / "wrong.parquet", tmp_path).prepare()
        assert caught.value.fix.startswith(fix)


def test_bytes_of_another_encoding_are_decoded_as_typed_in_the_error(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    pytest.importorskip("pandas")
    texts = [f"déjà vu {number}" for number in range(20)]
    parquet.write_table(pyarrow.table({"text": [text.encode("latin1") for text in texts]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="not UTF-8 text .*; it looks like windows-1252; type python -c") as caught:
        documents_of(tmp_path / "a.parquet", tmp_path).prepare()
    run_command(caught.value.fix, new := tmp_path / "new rows")
    assert [row.parse()["text"] for row in read(new)] == texts


def test_text_within_another_field_is_taken_out_as_typed_in_the_error(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"doc": {"ä b": text}}) + "\n" for text in texts))
    with pytest.raises(ConfigError, match="its fields are doc, and a field within another one is not read") as caught:
        documents_of(tmp_path / "a.jsonl", tmp_path, text_field="doc.ä b").prepare()
    if shutil.which("jq") is not None:
        run_command(caught.value.fix, new := tmp_path / "new rows")
        assert [row.parse()["doc.ä b"] for row in read(new)] == texts


def test_a_field_within_another_column_is_taken_out_as_typed_in_the_error(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    pytest.importorskip("pandas")
    parquet.write_table(pyarrow.table({"doc": [{"text": "a"}, {"text": "b"}]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="a field within another one is not read; type python -c") as caught:
        documents_of(tmp_path / "a.parquet", tmp_path, text_field="doc.text").prepare()
    run_command(caught.value.fix, new := tmp_path / "new rows")
    assert [row.parse()["doc.text"] for row in read(new)] == ["a", "b"]


def test_rows_of_json_are_read_whatever_the_name_of_their_file(tmp_path: Path) -> None:
    assert [row.parse() for row in read(write_lines(tmp_path / "a.parquet"))] == ROWS


@pytest.mark.parametrize(
    ("texts", "num_copies"), [(["same text"] * 60, True), ([f"text {i:02}" for i in range(60)], False)]
)
def test_copies_in_both_splits_are_counted(
    texts: list[str], num_copies: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        documents_of(tmp_path / "a.jsonl", tmp_path).prepare()
    assert ("18 documents of it are also trained on, as copies" in caplog.text) == num_copies


def test_documents_without_any_text_are_named_and_not_the_length_of_a_sample(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": ""}])
    with pytest.raises(
        ConfigError, match=f"data.path={tmp_path}: no document in it has any text; type data.path=<more"
    ):
        documents_of(tmp_path, tmp_path).prepare()


def test_names_of_files_may_be_any_bytes_and_their_places_are_one_line_of_text(tmp_path: Path) -> None:
    names = [b"caf\xe9.jsonl", b"a\n   type: rm -rf ~.jsonl"]
    (tmp_path / "raw").mkdir()
    for name in names:
        rows = [{"text": f"{name!r} {number}"} for number in range(20)]
        write_lines(tmp_path / "raw" / os.fsdecode(name), rows)
    source = documents_of(tmp_path / "raw", tmp_path)
    source.prepare()
    assert source.cache.meta.num_documents == 40
    assert [row.place for row in read(tmp_path / "raw")][::20] == ["a\\n   type: rm -rf ~.jsonl:1", "caf\\xe9.jsonl:1"]
    for name in names:
        (tmp_path / "raw" / os.fsdecode(name)).write_bytes(b'{"text": 1}\n')
        with pytest.raises(ConfigError) as caught:
            documents_of(tmp_path / "raw" / os.fsdecode(name), tmp_path).prepare()
        report = format_report([caught.value])
        report.encode("utf-8")
        assert [line for line in report.splitlines() if line.lstrip().startswith("type:")] == [report.splitlines()[-1]]


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, reason in (
        (tmp_path / "pipe", "it is a pipe, and data is read more than once"),
        ("/dev/null", "it is a device, not a file"),
        (tmp_path / "gone.jsonl", "it is a link to a file that does not exist"),
        (tmp_path / "loop", "it is a link that leads back to itself"),
        (tmp_path, "it is a link to a file that does not exist"),
        (tmp_path / "*.jsonl", "it is a link to a file that does not exist"),
        ("~nobody-here/x", "this machine has no user nobody-here"),
        ("", "data.path=: it is empty; type data.path=<a path; . is the working directory>"),
        (f"{tmp_path}/{'n' * 300}", "it cannot be read: File name too long"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read(path)


def test_a_plain_file_with_the_name_of_a_compressed_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [row.parse() for row in read(tmp_path / "a.jsonl.gz")] == ROWS
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x00\xff no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        [row.parse() for row in read(tmp_path / "b.jsonl.gz")]


def test_an_integer_of_more_digits_than_python_converts_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": ' + "9" * 6000 + ', "m": 7}\n')
    assert [row.parse() for row in read(tmp_path / "a.jsonl")] == [{"n": "9" * 6000, "m": 7}]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.CSV.gz", ","), ("a.csv", ";"), ("a.tsv", "\t")])
def test_lines_of_a_csv_are_rows(name: str, delimiter: str, tmp_path: Path) -> None:
    text = f'\ufeffprompt{delimiter}completion\r\n"1{delimiter}\r\n2"{delimiter}"""a"""\r\n\r\nä{delimiter}\r\n'
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    for path in (tmp_path / name, tmp_path):
        rows = read(path)
        assert [row.parse() for row in rows] == [
            {"prompt": f"1{delimiter}\r\n2", "completion": '"a"'},
            {"prompt": "ä", "completion": None},
        ]
        assert [row.place for row in rows] == [f"{name}:2", f"{name}:5"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"a,b\n1\n", "a.csv:2: it has 1 cells, and the first line names 2 columns"),
        (b"a,b\n1,2\n\n1,2,3\n", "a.csv:4: it has 3 cells, and the first line names 2 columns"),
        (b"a,a\n1,2\n", "its first line has the name 'a' twice, or none"),
        (b"a,\n1,2\n", "its first line has the name '' twice, or none"),
        (b"", "its first line has no names of columns"),
        (b'a,b\n"1"2,3\n', "it is no CSV: ',' expected after '\"'"),
        ("a,b\nä,ö\n".encode("latin-1") * 200, "not UTF-8"),
    ],
)
def test_a_csv_that_cannot_be_read_is_named_with_its_line(text: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "a.csv")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "fix"),
    [
        ([{"text": ["a"], "body": "b"}] * 3, "data.text_field=body, or data.path=<rows with text in text>"),
        ([{"text": None}] * 3, "data.path=<rows with text in text>"),
        ([{"text": {"en": "a"}}, {"text": "a"}], "mode=prepare quality=none"),
        ([{"text": "a"}, {"text": None}], "mode=prepare quality=none"),
        ([{"text": None}, {"text": "a"}], "mode=prepare quality=none"),
    ],
)
def test_a_field_without_any_text_is_not_what_other_rows_can_mend(rows: Any, fix: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match="its field text is .*, not text") as caught:
        documents_of(tmp_path, tmp_path).prepare()
    assert caught.value.fix.startswith(fix)
    assert caught.value.__cause__ is not caught.value, "a chain of causes ends"
