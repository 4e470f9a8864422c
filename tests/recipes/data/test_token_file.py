"""Token files are memory-mapped, and rejected if they cannot be right."""

import gzip
import logging
import os

import numpy as np
import pytest
from typed_remedies import run_command

from recipes.data.token_file import TokenFile
from recipes.data.token_shards.source import TokenShards
from recipes.errors import ConfigError


@pytest.fixture
def source(tmp_path):
    def make(path, **changes):
        settings = {
            "dtype": "uint16",
            "val_path": None,
            "val_fraction": 0.2,
            "vocab_size": 1000,
            "seq_len": 10,
            "cache_dir": str(tmp_path / "cache"),
        }
        return TokenFile(path=str(path), **(settings | changes))

    return make


def write(path, values, dtype="uint16"):
    np.array(values, dtype=dtype).tofile(path)
    return path


def test_the_tail_is_for_validation(source, tmp_path):
    data = source(write(tmp_path / "t.bin", range(100)))
    data.prepare()
    assert data.train()[0]["inputs"].tolist() == list(range(10))
    assert (len(data.train()), len(data.val())) == (7, 1)
    assert data.val()[0]["inputs"].tolist() == list(range(80, 90))
    assert data.tokenizer is None


def test_all_of_another_file_is_evaluated_whatever_the_run_validated_on(source, tmp_path):
    data = source(write(tmp_path / "t.bin", range(101)), val_path=str(tmp_path / "gone.bin"))
    data.hold_out_all()
    data.prepare()
    assert len(data.val()) == 10
    assert data.val()[0]["inputs"].tolist() == list(range(10))


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_checked_again(source, tmp_path):
    path = write(tmp_path / "t.bin", [7] * 100)
    source(path).prepare()
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    os.utime(write(path, [1007] * 100), ns=times)
    with pytest.raises(ConfigError, match="token id 1007 is outside the vocabulary"):
        source(path).prepare()


def test_a_separate_validation_file_leaves_the_other_for_training(source, tmp_path):
    val = write(tmp_path / "v.bin", range(500, 521))
    data = source(write(tmp_path / "t.bin", range(101)), val_path=str(val))
    data.prepare()
    assert (len(data.train()), len(data.val())) == (10, 2)
    assert data.val()[1]["targets"].tolist() == list(range(511, 521))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_npy_and_raw_files_give_the_same_samples(source, tmp_path, dtype):
    np.save(tmp_path / "t.npy", np.arange(100, dtype=dtype))
    raw = source(write(tmp_path / "t.bin", range(100), dtype), dtype=dtype)
    npy = source(tmp_path / "t.npy")
    raw.prepare()
    npy.prepare()
    for i in range(7):
        assert raw.train()[i]["inputs"].tolist() == npy.train()[i]["inputs"].tolist()


def test_a_token_beyond_the_vocabulary_is_rejected_also_in_a_late_chunk(source, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.data.token_file._CHUNK_TOKENS", 16)
    path = write(tmp_path / "t.bin", [*range(99), 1000])
    with pytest.raises(ConfigError) as caught:
        source(path).prepare()
    assert str(caught.value) == (
        f"data.path={path}: token id 1000 is outside the vocabulary (maximum 999); type model.vocab_size=1001 or more"
    )
    source(path, vocab_size=1001).prepare()
    with pytest.raises(ConfigError, match=r"holds 16-bit integers, .*; type data.dtype=uint16 model.vocab_size=1001"):
        source(write(tmp_path / "odd.bin", [0, 1000] * 20, "uint16"), dtype="uint32").prepare()


def test_the_result_of_the_check_is_cached_until_the_file_changes(source, tmp_path, monkeypatch):
    path = write(tmp_path / "t.bin", range(100))
    source(path).prepare()
    with monkeypatch.context() as patch:
        patch.setattr(np, "fromfile", lambda *_, **__: pytest.fail("read again"))
        source(path).prepare()
    write(path, range(950, 1060))
    with pytest.raises(ConfigError, match="token id 1059 is outside"):
        source(path).prepare()


@pytest.mark.parametrize(
    ("content", "why", "fix"),
    [
        (None, "there is no such file or folder", "data.path=<file of uint16 tokens>"),
        (b"", "the file is empty", "data.path=<file of uint16 tokens>"),
        (
            b"abc",
            "3 bytes are not a multiple of 2, the size of a uint16 token: it is truncated",
            "data.path=<file of uint16 tokens>, copied again",
        ),
    ],
)
def test_a_file_without_valid_tokens_is_rejected(source, tmp_path, content, why, fix):
    path = tmp_path / "t.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        source(path).prepare()
    assert str(caught.value) == f"data.path={path}: {why}; type {fix}"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("largest", "advises"), [(60_000, False), (200, True)])
def test_half_a_token_is_advised_to_be_of_the_other_type_only_if_it_may_be(source, tmp_path, largest, advises):
    dtype = "<u2" if advises else "<u4"
    tokens = np.arange(20, largest, largest // 100)[:101].astype(dtype)
    (tmp_path / "t.bin").write_bytes(tokens.tobytes() + b"\1\2" * (len(tokens.tobytes()) % 4 == 0))
    with pytest.raises(ConfigError, match="a uint32 token: it is truncated") as caught:
        source(tmp_path / "t.bin", dtype="uint32").prepare()
    assert ("data.dtype=uint16" in caught.value.fix) is advises


@pytest.mark.parametrize("kind", ["token_file", "token_shards"])
def test_a_dtype_that_a_header_overrules_is_named(source, tmp_path, kind, caplog):
    (tmp_path / "x").mkdir()
    for name in ("a.npy", "b.npy"):
        np.save(tmp_path / "x" / name, np.arange(100, dtype="u4"))
    read = source(tmp_path / "x" / "a.npy") if kind == "token_file" else shards_of(tmp_path / "x", tmp_path)
    with caplog.at_level("INFO", logger="lightning_recipes"):
        read.prepare()
    assert caplog.text.count("its tokens are uint32, as its header records; data.dtype=uint16 is for files") == 1


def test_a_file_shorter_than_one_sequence_is_rejected_for_either_split(source, tmp_path):
    path = write(tmp_path / "t.bin", range(12))
    with pytest.raises(ConfigError) as caught:
        source(path).prepare()
    assert str(caught.value) == (
        "seq_len=10 data.val_fraction=0.2: the training split has 10 tokens and one sample takes 11; "
        "type seq_len=5 data.val_fraction=0.5, or data.path=<more tokens>"
    )
    with pytest.raises(ConfigError, match="the validation split has 4 tokens"):
        source(write(path, range(20))).prepare()


def test_other_arrays_are_rejected(source, tmp_path):
    fix = "data.path=<one-dimensional .npy of uint16 or uint32>"
    path = tmp_path / "t.npy"
    for array in (np.zeros(9), np.zeros((3, 3), np.uint16)):
        np.save(path, array)
        with pytest.raises(ConfigError) as caught:
            source(path).prepare()
        reason = f"it is an array of {array.dtype.name} with the shape {array.shape}, and tokens are a row of uint16 or"
        assert str(caught.value) == f"data.path={path}: {reason} uint32; type {fix}"
    np.save(path, np.arange(100, dtype=np.uint16))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ConfigError, match=r"it is not a valid \.npy file"):
        source(path).prepare()


def test_an_archive_named_npy_is_rejected(source, tmp_path):
    path = tmp_path / "t.npy"
    with path.open("wb") as file:
        np.savez(file, tokens=np.arange(100, dtype=np.uint16))
    with pytest.raises(ConfigError) as caught:
        source(path).prepare()
    assert str(caught.value) == (
        f"data.path={path}: it is a zip archive, such as an .npz or a checkpoint, not raw tokens;"
        " type data.path=<one-dimensional .npy of uint16 or uint32>"
    )


def test_a_dtype_that_is_no_token_type_is_rejected(source):
    with pytest.raises(ConfigError) as caught:
        source("t.bin", dtype="int64")
    assert str(caught.value) == ("data.dtype=int64: tokens are unsigned integers; type data.dtype=uint16 or uint32")


@pytest.mark.parametrize(
    ("written", "read", "vocab_size", "bits"),
    [
        ("uint32", "uint16", 1000, 32),
        ("int32", "uint16", 1000, 32),
        ("int64", "uint16", 1000, 64),
        ("int64", "uint32", 1000, 64),
        ("uint32", "uint16", 128_256, 32),
    ],
)
def test_a_raw_file_of_wider_integers_is_rejected(source, tmp_path, written, read, vocab_size, bits):
    tokens = np.random.default_rng(0).integers(vocab_size, size=400)
    path = write(tmp_path / "t.bin", tokens, written)
    with pytest.raises(ConfigError) as caught:
        source(path, dtype=read, vocab_size=vocab_size).prepare()
    assert caught.value.setting == f"data.path={path} data.dtype={read}"
    assert f"the file holds {bits}-bit integers" in caught.value.reason
    assert "data.dtype=uint32" in caught.value.fix
    right = write(tmp_path / "right.bin", tokens, "uint32")
    source(right, dtype="uint32", vocab_size=vocab_size).prepare()


def test_a_file_of_the_right_type_is_not_taken_for_a_wider_one(source, tmp_path):
    generator = np.random.default_rng(0)
    for number, vocab_size in enumerate((3, 300, 65_536)):
        path = write(tmp_path / f"{number}.bin", generator.integers(vocab_size, size=400))
        source(path, vocab_size=vocab_size).prepare()


@pytest.mark.parametrize(("dtype", "vocab_size"), [("uint32", 1000), ("uint16", 1000), ("uint16", 65_536)])
def test_numbers_that_are_no_ids_do_not_hide_the_type_of_a_file(source, tmp_path, dtype, vocab_size):
    tokens = np.random.default_rng(0).integers(1000, size=400)
    tokens[::10] = -1
    path = write(tmp_path / "t.bin", tokens, "int32")
    with pytest.raises(ConfigError, match="4294967295, -1 as uint32, is") as caught:
        source(path, dtype=dtype, vocab_size=vocab_size).prepare()
    assert "uint16" not in caught.value.fix
    assert ("data.dtype=uint32" in caught.value.fix) == (dtype == "uint16")
    write(path, np.where(tokens < 0, 200_000, tokens), "uint32")  # of another tokenizer
    with pytest.raises(ConfigError, match=r"model.vocab_size=200001") as caught:
        source(path, dtype=dtype, vocab_size=vocab_size).prepare()
    source(path, dtype="uint32", vocab_size=200_001).prepare()


@pytest.mark.parametrize("kind", ["token_file", "token_shards"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_files_of_two_types_are_read_once_one_is_an_array(source, tmp_path, kind, dtype):
    tokens = np.random.default_rng(0).integers(1000, size=400)
    wide, narrow = str(write(tmp_path / "wide.bin", tokens, "int32")), str(write(tmp_path / "t.bin", tokens))

    def prepare(path, dtype):
        if kind == "token_file":
            return source(path, val_path=narrow, dtype=dtype).prepare()
        settings = {"dtype": dtype, "num_open_shards": 2, "cache_gb": None, "vocab_size": 1000, "seq_len": 10}
        return TokenShards(path=path, val_path=narrow, cache_dir=str(tmp_path / "cache"), **settings).prepare()

    with pytest.raises(ConfigError, match="32-bit integers, and data.val_path=.* 16-bit ones") as caught:
        prepare(wide, dtype)
    assert caught.value.setting == f"data.path={wide}"
    convert, _, rest = caught.value.fix.partition(", and its path")
    assert ("data.dtype=uint16" in rest) == (dtype == "uint32")
    run_command(convert, tmp_path / "wide")
    prepare(str(tmp_path / "wide.npy"), "uint16")


@pytest.mark.parametrize(("written", "read"), [(">u2", "uint16"), (">u4", "uint16"), (">u4", "uint32")])
def test_a_big_endian_file_is_read_once_it_is_converted_as_typed(source, tmp_path, written, read):
    tokens = np.random.default_rng(0).integers(1000, size=400)
    path = str(write(tmp_path / "it's t.bin", tokens, written))
    with pytest.raises(ConfigError, match="its bytes are big-endian: swapped, all of its .* are tokens") as caught:
        source(path, dtype=read).prepare()
    run_command(caught.value.fix, tmp_path / "t")
    converted = source(tmp_path / "t.npy", dtype=read)
    converted.prepare()
    assert converted.train()[0]["inputs"].tolist() == tokens[:10].tolist()


def test_a_header_of_llm_c_that_is_cut_is_no_tokens(source, tmp_path):
    (tmp_path / "t.bin").write_bytes(np.array([20240520, 1, 4000] + [0] * 100, "<i4").tobytes())
    with pytest.raises(ConfigError, match="begins with a header, as of llm.c, and ends after 412 bytes of it"):
        source(tmp_path / "t.bin").prepare()


def test_a_npy_file_of_another_name_is_read_and_one_of_int64_names_its_type(source, tmp_path):
    np.save(tmp_path / "t.npy", np.arange(100, dtype="uint32"))
    renamed = source((tmp_path / "t.npy").rename(tmp_path / "t.bin"))
    renamed.prepare()
    assert renamed.train()[0]["inputs"].tolist() == list(range(10))
    np.save(tmp_path / "wide.npy", np.arange(100))
    with pytest.raises(ConfigError, match=r"it is an array of int64 with the shape \(100,\)"):
        source(tmp_path / "wide.npy").prepare()


def test_a_file_that_cannot_be_read_is_named(source, tmp_path, monkeypatch):
    path = write(tmp_path / "t.bin", range(100))

    def refuse(file, *_, **__):  # root may read anything
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(ConfigError) as caught:
        source(path).prepare()
    assert str(caught.value) == (
        f"data.path={path}: it cannot be read: Permission denied; type data.path=<file of uint16 tokens>"
    )


def write_llm_c(path, tokens, *, magic=20240520, dtype="uint16", counted=None):
    """Write the header of 256 int32 that llm.c and its followers put before the tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(tokens) if counted is None else counted
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype=dtype).tobytes())
    return path


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_the_header_of_llm_c_is_no_tokens_and_gives_the_dtype(source, tmp_path, magic, dtype):
    write_llm_c(tmp_path / "t.bin", range(100), magic=magic, dtype=dtype)
    data, raw = source(tmp_path / "t.bin"), source(write(tmp_path / "raw.bin", range(100)))
    data.prepare()
    raw.prepare()
    assert len(data.train()) == len(raw.train()) == 7
    assert [row["inputs"].tolist() for row in data.train()] == [row["inputs"].tolist() for row in raw.train()]
    write_llm_c(tmp_path / "t.bin", range(100), magic=magic, dtype=dtype, counted=101)
    for counted in (0, -5, 50):
        write_llm_c(tmp_path / "t.bin", range(100), magic=magic, dtype=dtype, counted=counted)
        with pytest.raises(ConfigError, match=rf"counts {counted} tokens, and it holds 100: the count is wrong; type"):
            source(tmp_path / "t.bin").prepare()
    write_llm_c(tmp_path / "t.bin", range(100), magic=magic, dtype=dtype, counted=101)
    with pytest.raises(ConfigError, match=r"counts 101 tokens, and it holds 100: it is truncated"):
        source(tmp_path / "t.bin").prepare()


@pytest.mark.parametrize("vocab_size", [1000, 65_536])
@pytest.mark.parametrize(
    ("content", "reason", "fix"),
    [
        (gzip.compress(bytes(range(256)) * 4, mtime=0), "it is compressed with gzip", "gunzip < "),
        (b"PAR1" + bytes(60), "it is a Parquet file", "data.path="),
        (b"MMIDIDX\x00\x00" + bytes(59), "it is the index of a Megatron dataset", "data.path="),
        (b"\x89HDF\r\n\x1a\n" + bytes(60), "it is an HDF5 file", "data.path="),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer", "git -C /"),
        (b"a text that was never tokenized\n" * 4, "it is text, not tokens", "data=text_files data.path="),
        ("текст, который не разбит на токены\n".encode() * 4, "it is text, not tokens", "data=text_files data.path="),
        (b"\xef\xbb\xbftext with a byte order mark\r\n" * 4, "it is text, not tokens", "data=text_files data.path="),
        ("это обычный русский текст\n".encode("koi8-r") * 40, "it is text, which looks like koi8-r", "iconv -f koi8-r"),
        (("a text of two bytes, " * 40).encode("utf-16"), "it is text, which looks like utf-16", "iconv -f utf-16 "),
        (b'{"text": "a row of JSON", "id": 1}\n' * 4, "it holds rows of JSON", "data=documents data.path="),
    ],
    ids=lambda value: None if isinstance(value, int) else str(value)[:20],
)
def test_a_file_of_another_kind_is_named_and_no_larger_vocabulary_is_advised(
    source, tmp_path, content, reason, fix, vocab_size
):
    (tmp_path / "t.bin").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / "t.bin", vocab_size=vocab_size).prepare()
    assert caught.value.reason.startswith(reason)
    assert caught.value.fix.startswith(fix)


HEADER = "{'descr': '<u2', 'fortran_order': False, 'shape': (%s), }"
NPY_HEADERS = {
    "more tokens than the file": HEADER % "101,",
    "a huge number": HEADER % "1000000000000000000,",
    "a negative number": HEADER % "-5,",
    "no shape": "{'descr': '<u2'}",
    "an unknown dtype": HEADER.replace("<u2", "<zz") % "100,",
    "objects": HEADER.replace("<u2", "|O") % "100,",
    "big-endian": HEADER.replace("<u2", ">u2") % "100,",
    "an open bracket": "{'descr': (((",
    "nested": "{'descr': " + "(" * 3000 + ")" * 3000 + "}",
    "a call": "{'descr': open('x')}",
}


@pytest.mark.parametrize("header", NPY_HEADERS)
@pytest.mark.parametrize("kind", ["token_file", "token_shards"])
def test_a_npy_file_whose_header_is_wrong_is_rejected_by_both_readers(source, tmp_path, header, kind):
    text = NPY_HEADERS[header].encode()
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("a.npy", "b.npy"):
        head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        (folder / name).write_bytes(head + np.arange(100, dtype="<u2").tobytes())
    read = source(folder / "a.npy") if kind == "token_file" else shards_of(folder, tmp_path)
    with pytest.raises(ConfigError) as caught:
        read.prepare()
    assert "type data.path=" in str(caught.value)


def shards_of(folder, tmp_path, **changes):
    settings = {"path": str(folder), "val_path": None, "dtype": "uint16", "num_open_shards": 2, "cache_gb": None}
    settings |= {"vocab_size": 1000, "seq_len": 10, "cache_dir": str(tmp_path / "cache")}
    return TokenShards(**(settings | changes))


def test_shards_are_read_as_single_files_are(tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("a.bin", "b.bin"):
        write_llm_c(folder / name, range(100))
    shards = shards_of(folder, tmp_path)
    shards.prepare()
    assert shards.train().counts == [9]
    assert shards.train()[0]["inputs"].tolist() == list(range(10))
    np.save(folder / "b.npy", np.arange(100, dtype="uint16"))
    data = (folder / "b.npy").read_bytes()
    (folder / "b.npy").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"b\.npy: it is not a valid .npy file: it holds .* of its 100 tokens"):
        shards_of(folder, tmp_path).prepare()
    (folder / "b.npy").unlink()
    tokens = np.random.default_rng(0).integers(1000, size=400)
    for written, bits in (("uint32", 32), ("int64", 64)):
        write(folder / "c.bin", tokens, written)
        with pytest.raises(ConfigError, match=f"the file holds {bits}-bit integers"):
            shards_of(folder, tmp_path).prepare()
    write(folder / "c.bin", [7, *[0] * 399])  # a token and padding
    shards_of(folder, tmp_path).prepare()


def test_shards_skip_hidden_and_unfinished_copies_and_name_links_to_nothing(tmp_path, caplog):
    folder = tmp_path / "tokens"
    for name in ("a.bin", "b.BIN", ".ipynb_checkpoints/a.bin", "._a.bin", "_temporary/a.bin", "meta.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, range(100))
    with caplog.at_level(logging.INFO, logger="lightning_recipes"):
        shards = shards_of(folder, tmp_path)
        shards.prepare()
    assert (len(shards.train().counts), len(shards.val().counts)) == (1, 1)
    assert "2 files are read; skipped: 4 (2 hidden folders, 1 hidden, 1 .json)" in caplog.text
    (folder / "c.bin").symlink_to(folder / "nowhere")
    with pytest.raises(ConfigError, match=r"c\.bin: it is a link to a file that does not exist"):
        shards_of(folder, tmp_path).prepare()


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b'\x50\x00\x00\x00\x00\x00\x00\x00{"t":{', "a safetensors file"),
        (b"GGUF\x03\x00\x00\x00", "a GGUF file"),
        (b"PK\x03\x04", "a zip archive"),
        (b"PAR1", "a Parquet file"),
        (b"\x89PNG\r\n", "a PNG image"),
        (b"%PDF-1.4", "a PDF"),
        (b"\x80\x04\x95\x01", "a pickle"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j", "a checkpoint of PyTorch"),
    ],
)
def test_a_file_of_another_kind_is_named(source, tmp_path, head, kind):
    path = tmp_path / "t.bin"
    path.write_bytes(head + b"\x7d\x7d" * 500)
    with pytest.raises(ConfigError, match=f"it is {kind}.*, not raw tokens"):
        source(path).prepare()


def test_what_follows_an_array_is_not_read_and_logged(source, tmp_path, caplog):
    with open(tmp_path / "t.npy", "wb") as file:
        for _ in range(2):
            np.save(file, np.arange(100, dtype=np.uint16))
    source(tmp_path / "t.npy").prepare()
    assert "t.npy: it is an array of 100 tokens, and 328 bytes after it are not read" in caplog.text


def test_a_file_does_not_train_on_what_it_validates_on(source, tmp_path):
    path = write(tmp_path / "t.bin", range(100))
    (tmp_path / "link.bin").symlink_to(path)
    data = source(path, val_path=str(tmp_path / "link.bin"))
    data.prepare()
    assert len(data.val()) == 9, "all of it, for those who only evaluate"
    with pytest.raises(ConfigError, match=r"it is the file of data\.path, so no token is left to train on"):
        data.describe()


def test_what_another_source_validates_on_is_held_out(source, tmp_path):
    path = write(tmp_path / "t.bin", range(100))
    data, other = source(path, val_fraction=0.2), source(path, val_fraction=0.5)
    data.prepare()
    other.prepare()
    [text] = other.split_texts()
    assert data.hold_out(np.array([text["key"]]), np.array([text["num_train"]])) == 1
    assert (len(data.train()), len(data.val())) == (4, 1)
    assert data.hold_out(np.array([text["key"]]), np.array([60])) == 0
