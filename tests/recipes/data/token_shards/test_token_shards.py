"""Files of tokens: an order that reads few of them at a time, copies within a limit, and what is wrong with a file."""

import pickle
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from support import execute, read_metrics

from recipes.data.batches import PositionSampler
from recipes.data.token_shards.source import ShardOrder, TokenShards
from recipes.data.token_shards.storage import Storage, find_packages
from recipes.errors import ConfigError

SEQ_LEN = 8
BUCKET = "memory://bucket"


def write_shards(path: str, lengths: list[int], *, dtype: str = "uint16", suffix: str = ".npy") -> str:
    """Write files of tokens that count from the file's number times 1,000."""
    files, folder = fsspec.core.url_to_fs(path)
    files.makedirs(folder, exist_ok=True)
    for number, length in enumerate(lengths):
        tokens = (1000 * number + np.arange(length)).astype(dtype)
        with files.open(f"{folder}/{number:03}{suffix}", "wb") as file:
            if suffix == ".npy":
                np.save(file, tokens)
            else:
                file.write(tokens.tobytes())
    return path


def shards_of(path: str, cache: Path, **settings: Any) -> TokenShards:
    settings = {
        "path": path,
        "val_path": None,
        "dtype": "uint16",
        "num_open_shards": 2,
        "cache_gb": None,
        "vocab_size": 60_000,
        "seq_len": SEQ_LEN,
        "cache_dir": str(cache),
    } | settings
    source = TokenShards(**settings)
    source.prepare()
    return source


@pytest.fixture(autouse=True)
def empty_bucket() -> None:
    files = fsspec.filesystem("memory")
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


def file_of(order: ShardOrder, counts: list[int], positions: Any) -> list[int]:
    return np.searchsorted(np.cumsum(counts), order.indices(np.asarray(positions)), side="right").tolist()


COUNTS = [5, 17, 3, 40, 11, 0, 8, 29]


@pytest.mark.parametrize("num_open_shards", [1, 3, 100])
def test_an_epoch_brings_every_sample_once(num_open_shards: int) -> None:
    order = ShardOrder(COUNTS, num_open_shards=num_open_shards, seed=3)
    total = sum(COUNTS)
    first, second = order.indices(np.arange(2 * total)).reshape(2, total)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(total))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("num_open_shards", [1, 3])
def test_no_more_files_than_chosen_are_read_at_a_time(num_open_shards: int) -> None:
    counts = [count for count in COUNTS if count]
    order = ShardOrder(counts, num_open_shards=num_open_shards, seed=3)
    files = file_of(order, counts, np.arange(sum(counts)))
    seen = list(dict.fromkeys(files))
    for start in range(0, len(seen), num_open_shards):
        group = set(seen[start : start + num_open_shards])
        places = [place for place, file in enumerate(files) if file in group]
        assert places == list(range(places[0], places[0] + len(places)))
    assert seen != sorted(seen), "files in another order"


def test_an_order_depends_on_position_and_seed_alone() -> None:
    order, again = (ShardOrder(COUNTS, num_open_shards=3, seed=3) for _ in range(2))
    positions = np.random.default_rng(0).integers(0, 10 * sum(COUNTS), 25)
    one_by_one = [again(int(position)) for position in positions]
    assert order.indices(positions).tolist() == one_by_one
    assert pickle.loads(pickle.dumps(order)).indices(positions).tolist() == one_by_one
    other = ShardOrder(COUNTS, num_open_shards=3, seed=4)
    assert other.indices(positions).tolist() != one_by_one


def test_ranks_share_the_stream_and_resume_within_it() -> None:
    order = ShardOrder(COUNTS, num_open_shards=3, seed=3)
    whole = order.indices(np.arange(240)).tolist()
    for world_size in (1, 2, 4):
        batches = [
            list(
                PositionSampler(
                    order, start_position=120, micro_batch_size=3, rank=r, world_size=world_size, num_micro_batches=5
                )
            )
            for r in range(world_size)
        ]
        stream = [sample for number in range(5) for rank in batches for sample in rank[number]]
        assert stream == whole[120 : 120 + len(stream)]


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_are_cut_from_each_file(suffix: str, dtype: str, tmp_path: Path) -> None:
    path = write_shards(str(tmp_path / "tokens"), [20, 33, 9, 17], dtype=dtype, suffix=suffix)
    source = shards_of(path, tmp_path, dtype=dtype)
    train, val = source.train(), source.val()
    assert train.counts == [2, 4, 1]
    assert len(val) == 2
    starts = [train[index]["inputs"][0].item() for index in range(len(train))]
    assert starts == [0, 8, 1000, 1008, 1016, 1024, 2000]
    assert train[2]["inputs"].tolist() == list(range(1000, 1008))
    assert train[2]["targets"].tolist() == list(range(1001, 1009))
    assert val[1]["inputs"][0] == 3008
    assert source.describe_sample(6)["documents"][0]["name"].endswith(f"002{suffix}")
    assert [pickle.loads(pickle.dumps(train))[i]["inputs"][0].item() for i in range(7)] == starts


def test_files_of_a_bucket_are_copied_when_they_are_first_read(tmp_path: Path) -> None:
    source = shards_of(write_shards(BUCKET, [20, 33, 17]), tmp_path)
    assert not list(tmp_path.rglob("*.npy"))
    assert source.train()[2]["inputs"][0] == 1000
    copies = list(tmp_path.rglob("*.npy"))
    assert [path.name.partition("_")[2] for path in copies] == ["001.npy"]
    fsspec.filesystem("memory").rm("/bucket/001.npy")
    again = pickle.loads(pickle.dumps(source.train()))
    assert again[2]["inputs"][0] == 1000, "from the copy"
    assert not list(tmp_path.rglob("*.partial.*"))


def test_copies_stay_within_their_limit(tmp_path: Path) -> None:
    source = shards_of(write_shards(BUCKET, [400] * 6), tmp_path, cache_gb=2e-6, num_open_shards=1)  # two of 928 bytes
    train = source.train()
    per_file = train.counts[0]
    for index in range(0, len(train), per_file):
        assert train[index]["inputs"][0] == 1000 * (index // per_file)
        assert len(list(tmp_path.rglob("*.npy"))) <= 2
    assert train[0]["inputs"][0] == 0, "an open file is read on"


def test_files_may_be_named_by_a_glob_and_validation_by_a_path_of_its_own(tmp_path: Path) -> None:
    write_shards(str(tmp_path / "train"), [20, 20])
    write_shards(str(tmp_path / "val"), [33], suffix=".bin")
    source = shards_of(str(tmp_path / "train" / "*.npy"), tmp_path, val_path=str(tmp_path / "val"))
    assert (len(source.train()), len(source.val())) == (4, 4)
    other = shards_of(str(tmp_path / "train" / "000.npy"), tmp_path, val_path=str(tmp_path / "val" / "000.bin"))
    assert len(other.train()) == 2
    assert other.fingerprint != source.fingerprint


@pytest.mark.parametrize("folder", ["{}", BUCKET])
def test_files_for_validation_are_not_trained_on(folder: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    path = write_shards(folder.format(tmp_path / "tokens"), [20, 20, 20])
    source = shards_of(path, tmp_path, val_path=f"{path}/001.npy")
    assert [source.train()[i]["inputs"][0].item() for i in range(len(source.train()))] == [0, 8, 2000, 2008]
    assert source.val()[0]["inputs"][0] == 1000
    assert "1 of data.path is a file of data.val_path, too, and not trained on" in caplog.text
    [trained, *_] = source.split_texts()
    assert source.hold_out(np.array([trained["key"]]), np.array([10])) == 1
    assert [source.train()[i]["inputs"][0].item() for i in range(len(source.train()))] == [0, 2000, 2008]
    with pytest.raises(ConfigError, match=r"all files of data\.path are in it, so none is left to train on"):
        shards_of(path, tmp_path, val_path=path).describe()


@pytest.mark.parametrize(
    ("lengths", "settings", "reason"),
    [
        ([20], {}, r"a single file.*, or data=token_file data.path=\S+\.npy$"),
        ([5, 5], {}, "no training file has 9 tokens"),
        ([20, 5], {}, "no validation file has 9 tokens"),
        ([20, 20], {"path": "nothing"}, "there is no such file or folder"),
        ([20, 20], {"path": "unknown://x"}, "cannot be read"),
        ([20, 20], {"val_path": "nothing/*.npy"}, "no file matches"),
    ],
)
def test_too_few_files_are_a_sentence(lengths: list[int], settings: Any, reason: str, tmp_path: Path) -> None:
    path = write_shards(str(tmp_path / "tokens"), lengths)
    with pytest.raises(ConfigError, match=reason):
        shards_of(**({"path": path, "cache": tmp_path} | settings))


@pytest.mark.parametrize(
    ("protocol", "packages"),
    [
        ("s3", "s3fs"),
        ("gs", "gcsfs"),
        ("az", "adlfs"),
        ("sftp", "paramiko"),
        ("https", "requests aiohttp"),
        ("hf", "huggingface-hub"),
        ("simplecache::s3", "s3fs"),
        ("memory", None),
        ("unknown", None),
    ],
)
def test_each_protocol_has_its_package(protocol: str, packages: str | None) -> None:
    assert find_packages(protocol) == packages


def test_a_package_that_is_missing_is_installed_by_what_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"s3:// needs a package .*not installed \(Imp.*; type pip install s3fs$"):
        Storage("s3://bucket/x/*.npy", setting="data.path", suffixes=[".npy"], content="tokens", cache_dir=tmp_path)


def test_files_of_something_else_are_named(tmp_path: Path) -> None:
    write_shards(str(tmp_path / "tokens"), [20, 20])
    np.save(tmp_path / "tokens" / "001.npy", np.zeros((3, 3), dtype=np.float32))
    with pytest.raises(ConfigError, match=r"001\.npy: it is an array of float32 with the shape \(3, 3\)"):
        shards_of(str(tmp_path / "tokens"), tmp_path)
    (tmp_path / "tokens" / "001.npy").write_bytes(b"no array")
    with pytest.raises(ConfigError, match=r"001\.npy"):
        shards_of(str(tmp_path / "tokens"), tmp_path)
    (tmp_path / "tokens" / "001.npy").unlink()
    (tmp_path / "tokens" / "002.bin").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="3 bytes are not a multiple of 2"):
        shards_of(str(tmp_path / "tokens"), tmp_path)


def test_tokens_beyond_the_vocabulary_are_found_when_a_file_is_opened(tmp_path: Path) -> None:
    source = shards_of(write_shards(BUCKET, [20, 20, 20]), tmp_path, vocab_size=1019)
    assert source.train()[0]["inputs"][0] == 0
    with pytest.raises(ConfigError, match=r"bucket/001\.npy: token id 1019 is outside the vocabulary \(maximum 1018\)"):
        source.train()[2]


def test_a_run_on_a_bucket_resumes_with_the_rows_that_are_left(tmp_path: Path) -> None:
    # this process holds the bucket, and ranks of one device are this process
    path = write_shards(BUCKET, [400, 300, 500, 200])
    tiny = [
        *("model.num_layers=1", "model.num_heads=2", "model.hidden_size=16", "model.max_seq_len=16", "callbacks=[]"),
        *("data=token_shards", f"data.path={path}", f"data.cache_dir={tmp_path / 'cache'}", "data.num_open_shards=2"),
        *("model.vocab_size=4096", "global_batch_size=4", "save_every=5", "eval_every=5", "trainer.accelerator=cpu"),
    ]
    assert execute(*tiny, "trainer.max_steps=10", f"hydra.run.dir={tmp_path / 'whole'}") == 0
    assert execute(*tiny, "trainer.max_steps=5", f"hydra.run.dir={tmp_path / 'parts'}") == 0
    rest = [f"hydra.run.dir={tmp_path / 'rest'}", "trainer.max_steps=10"]
    assert execute(f"resume={tmp_path / 'parts'}", *rest) == 0
    whole = [row["train/loss"] for row in read_metrics(tmp_path / "whole")]
    assert [row["train/loss"] for row in read_metrics(tmp_path / "rest")] == pytest.approx(whole[5:], rel=1e-6)
