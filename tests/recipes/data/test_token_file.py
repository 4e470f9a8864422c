"""Token files are memory-mapped, and rejected if they cannot be right."""

import numpy as np
import pytest

from recipes.data.token_file import TokenFile
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
        f"data.path={path}: token id 1000 is outside the vocabulary (maximum 999); "
        "type model.vocab_size=1001 or more, or the right data.dtype"
    )
    source(path, vocab_size=1001).prepare()


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
        (None, "there is no such file", "data.path=<file of uint16 tokens>"),
        (b"", "the file is empty", "data.path=<file of uint16 tokens>"),
        (
            b"abc",
            "3 bytes are not a multiple of 2, the size of a uint16 token: it is truncated",
            "data.path=<file of uint16 tokens>, copied again, or the right data.dtype",
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


def test_a_file_shorter_than_one_sequence_is_rejected_for_either_split(source, tmp_path):
    path = write(tmp_path / "t.bin", range(12))
    with pytest.raises(ConfigError) as caught:
        source(path).prepare()
    assert str(caught.value) == (
        "seq_len=10: the training split has 10 tokens and one sample takes 11; "
        "type seq_len=9 or less, or data.path=<more tokens>"
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
        assert str(caught.value) == (f"data.path={path}: it holds {array.dtype} {array.shape}; type {fix}")
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
        f"data.path={path}: it is not a valid .npy file (an archive of several arrays);"
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


def test_a_npy_file_of_another_name_is_rejected_and_one_of_int64_names_its_type(source, tmp_path):
    np.save(tmp_path / "t.npy", np.arange(100, dtype="uint16"))
    (tmp_path / "t.npy").rename(tmp_path / "t.bin")
    with pytest.raises(ConfigError, match="it is a .npy file"):
        source(tmp_path / "t.bin").prepare()
    np.save(tmp_path / "wide.npy", np.arange(100))
    with pytest.raises(ConfigError, match=r"it holds int64 \(100,\)"):
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
