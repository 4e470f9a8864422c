"""Text from a file, a folder or a glob; every error says what to type."""

import gzip
import os

import pytest

from recipes.data.text_files import TEXT_SUFFIXES, TextFiles
from recipes.errors import ConfigError
from recipes.tokenizer.bytes import Bytes

USUAL = "data.path=<file, folder or 'glob/**/*.txt' of UTF-8 text>"


@pytest.fixture
def source(tmp_path):
    def make(path, **changes):
        settings = {
            "tokenizer": Bytes(),
            "seq_len": 8,
            "val_fraction": 0.2,
            "cache_dir": str(tmp_path / "cache"),
        }
        return TextFiles(path=str(path), **(settings | changes))

    return make


@pytest.fixture
def folder(tmp_path):
    texts = tmp_path / "texts"
    for name in ("b.txt", "a/z.md", "a/c.bin", ".hidden/h.txt", "a/.h.txt", "d.TXT"):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_text(f"text of {name}; " * 9)
    return texts


def names(source):
    return [document.name for document in source.list_documents()]


def test_a_folder_gives_its_text_files_by_relative_path(source, folder):
    assert names(source(folder)) == ["a/z.md", "b.txt", "d.TXT"]


def test_a_glob_gives_every_file_it_matches(source, folder):
    assert names(source(f"{folder}/**/*.bin")) == ["c.bin"]
    assert names(source(f"{folder}/**/*")) == ["a/c.bin", "a/z.md", "b.txt", "d.TXT"]


def test_a_file_gives_itself(source, folder):
    assert names(source(folder / "a/c.bin")) == ["c.bin"]


def test_windows_of_both_splits_hold_the_text(source, folder):
    text_files = source(folder / "b.txt")
    text_files.prepare()
    first = text_files.train()[0]["inputs"].tolist()
    assert text_files.tokenizer.decode(first) == "text of "
    assert len(text_files.val()) > 0
    assert text_files.tokenizer.vocab_size == 257
    description = text_files.describe_sample(0)
    assert [one["name"] for one in description["documents"]] == ["b.txt"]
    assert description["documents"][0]["first_token"] == 0
    assert description["text"] == text_files.tokenizer.decode(text_files.train()[0]["inputs"].tolist())


@pytest.mark.parametrize(
    ("path", "why", "fix"),
    [
        ("missing", "there is no such file or folder", USUAL),
        ("*.nothing", "no file matches", USUAL),
        ("empty.txt", "there is no text in it, 0 bytes", USUAL),
    ],
)
def test_a_path_without_text_is_rejected(source, tmp_path, path, why, fix):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / path).prepare()
    assert str(caught.value) == f"data.path={tmp_path / path}: {why}; type {fix}"
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_text_files_lists_the_suffixes(source, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.bin").write_text("text")
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / "data").prepare()
    shown = ", ".join(sorted(TEXT_SUFFIXES))
    assert caught.value.reason == f"the folder has no {shown} file; skipped: 1 (1 .bin)"
    assert caught.value.fix == f"\"data.path='{tmp_path}/data/**/*'\" to read every file in it"


def test_too_little_text_is_rejected_for_either_split(source, tmp_path):
    (tmp_path / "short.txt").write_text("0123456789")
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / "short.txt", seq_len=20).prepare()
    assert str(caught.value) == (
        "seq_len=20 data.val_fraction=0.2: the training split has 9 tokens and one sample takes 21; "
        "type seq_len=4 data.val_fraction=0.5, or data.path=<more text>"
    )
    source(tmp_path / "short.txt", seq_len=4, val_fraction=0.5).prepare()
    (tmp_path / "short.txt").write_text("0123456789" * 4)
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / "short.txt", seq_len=10).prepare()
    assert str(caught.value) == (
        "seq_len=10 data.val_fraction=0.2: the validation split has 8 tokens and one sample takes 11; "
        "type seq_len=7 or less, or data.val_fraction=0.27, or data.path=<more text>"
    )
    source(tmp_path / "short.txt", seq_len=7).prepare()
    source(tmp_path / "short.txt", seq_len=10, val_fraction=0.27).prepare()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 0}, "seq_len=0: a sample has at least one token; type seq_len=256"),
        (
            {"val_fraction": 1.0},
            "data.val_fraction=1.0: it is the fraction of the text for validation, and both splits "
            "need text; type data.val_fraction=0.05",
        ),
        (
            {"tokenizer": {}},
            "tokenizer=none: text needs a tokenizer; type tokenizer=bpe or tokenizer=bytes",
        ),
    ],
)
def test_settings_out_of_range_are_rejected(source, changes, message):
    with pytest.raises(ConfigError) as caught:
        source("anything", **changes)
    assert str(caught.value) == message


def test_a_link_to_nothing_is_named(source, folder):
    (folder / "gone.txt").symlink_to(folder / "nowhere.txt")
    with pytest.raises(ConfigError, match=r"gone\.txt.*it is a link to a file that does not exist"):
        source(folder).list_documents()


def test_a_folder_that_cannot_be_listed_is_named(source, folder, monkeypatch):
    listed = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match=r"/a: it cannot be read: Permission denied"):
        source(folder).list_documents()


def test_a_file_that_cannot_be_read_is_named(source, folder, monkeypatch):
    opened = type(folder).open

    def refuse(file, *arguments, **more):  # root may read anything
        if file.suffix == ".txt":
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *arguments, **more)

    monkeypatch.setattr(type(folder), "open", refuse)
    with pytest.raises(ConfigError, match=r"\.txt: it cannot be read: Permission denied; type data\.path="):
        source(folder).prepare()


@pytest.mark.parametrize(
    ("content", "reason", "fix"),
    [
        ("UTF-16 with a mark".encode("utf-16"), "it is UTF-16 text", "iconv -f utf-16 "),
        (("text without a mark, as 16 bits a character; " * 2).encode("utf-16-le"), "it is UTF-16LE text", "iconv -f"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "it is a Git LFS pointer", "git -C /"),
        (gzip.compress(b"text" * 100, mtime=0), "it is compressed with gzip", "gunzip < "),
        (b"PAR1" + bytes(60), "it is a Parquet file", "data=documents data.path="),
        (b"ARROW1" + bytes(60), "it is an Arrow file", "data=documents data.path="),
        (b"\xff\xff\xff\xff\x80\0\0\0" + bytes(60), "it is an Arrow stream", "data=documents data.path="),
        (
            b"PK\x03\x04" + bytes(26) + b"word/document.xml",
            "it is a document of a word processor",
            "data.path=<its text",
        ),
        (
            b"PK\x03\x04" + bytes(60),
            "it is a zip archive, such as an .npz or a checkpoint",
            "data.path=<a file ",
        ),
        (b"%PDF-1.7", "it is a PDF", "data.path=<its text"),
    ],
)
def test_what_is_no_text_is_named_also_where_its_bytes_are_utf_8(source, tmp_path, content, reason, fix):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / "a.txt").prepare()
    assert caught.value.setting == f"data.path={tmp_path / 'a.txt'}"
    assert caught.value.reason == (f"{reason}: the file itself was not downloaded" if "LFS" in reason else reason)
    assert caught.value.fix.startswith(fix)


def test_an_empty_folder_advises_no_glob_that_finds_nothing_either(source, tmp_path):
    (tmp_path / "texts" / ".hidden").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / "texts").prepare()
    assert caught.value.fix == USUAL


def test_files_of_rows_are_for_another_option(source, tmp_path, caplog):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"text": "some text"}\n' * 40)
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / "rows").prepare()
    assert caught.value.fix == f"data=documents data.path={tmp_path}/rows"
    (tmp_path / "b.txt").write_bytes((tmp_path / "rows" / "a.jsonl").read_bytes())
    source(tmp_path / "b.txt").prepare()
    assert "b.txt: 1 file of rows is read as plain text" in caplog.text
    caplog.clear()
    source(tmp_path / "rows" / "a.jsonl").prepare()
    assert "1 file of rows is read as plain text, with braces and field names" in caplog.text
