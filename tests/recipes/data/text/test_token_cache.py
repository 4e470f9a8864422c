"""A token cache is complete or absent: after kills, races and errors."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from chats import chat_tokenizer

from recipes.data.text.corpus import Corpus, Document
from recipes.data.text.token_cache import FORMAT_VERSION, cached_tokens
from recipes.errors import ConfigError
from recipes.tokenizer.bytes import byte_tokenizer

ROOT = Path(__file__).parents[4]

SCRIPT = """
import sys
from pathlib import Path
from recipes.data.text.corpus import Corpus, Document
from recipes.data.text.token_cache import cached_tokens
from recipes.tokenizer.bpe import Bpe

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    documents = [Document.of(path, name=path.name) for path in sorted(folder.glob("*.txt"))]
    corpus = Corpus(documents, cache_dir=folder / "cache")
    tokenizer = Bpe(vocab_size=400, max_training_bytes=50_000).make(corpus)
    cache = cached_tokens(corpus, tokenizer, val_fraction=0.1, num_processes=2)
    print(cache.folder.name, cache.meta.num_train_tokens, cache.meta.num_val_tokens)
"""


def start(folder):
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py"), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def tokens_folders(folder):
    found = sorted((folder / "cache" / "tokens").glob("*"))
    return [path for path in found if path.is_dir()]


def children(pid):
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the other processes took too long"
        time.sleep(0.01)


def make(corpus, val_fraction=0.1):
    return cached_tokens(corpus, byte_tokenizer(), val_fraction=val_fraction, num_processes=1)


def read(cache, split):
    return np.fromfile(cache.path(split), dtype=cache.meta.dtype)


def test_documents_end_with_the_end_of_text_token_and_the_tail_is_held_out(make_corpus):
    cache = make(make_corpus({"a.txt": b"abc", "b.txt": b"defghij"}), val_fraction=0.25)
    assert read(cache, "train").tolist() == [*b"abc", 256, *b"defgh"]
    assert read(cache, "val").tolist() == [*b"ij", 256]
    assert (cache.meta.num_train_tokens, cache.meta.num_val_tokens) == (9, 3)


def test_documents_start_with_what_the_tokenizer_puts_before_every_text_and_under_another_key(make_corpus):
    corpus = make_corpus({"a.txt": b"abc", "b.txt": b"defghij"})
    tokenizer = chat_tokenizer()
    start, end = tokenizer.first_tokens[0], tokenizer.end_of_text
    cache = cached_tokens(corpus, tokenizer, val_fraction=0.25, num_processes=1)
    assert read(cache, "train").tolist() == [start, *b"abc", end, start, *b"defg"]
    assert read(cache, "val").tolist() == [*b"hij", end]
    assert cache.documents("train", start=5, stop=7) == [{"name": "b.txt", "first_token": 0, "num_tokens": 2}]
    # the key of a cache without the start
    before = f"{FORMAT_VERSION} {corpus.content_hash} {tokenizer.fingerprint} 0.25"
    assert cache.folder.name != hashlib.blake2b(before.encode(), digest_size=12).hexdigest()
    without = f"{FORMAT_VERSION} {corpus.content_hash} {byte_tokenizer().fingerprint} 0.25"
    assert make(corpus, 0.25).folder.name == hashlib.blake2b(without.encode(), digest_size=12).hexdigest()


def test_the_index_says_which_document_a_token_comes_from(make_corpus):
    cache = make(make_corpus({"a.txt": b"abc", "b.txt": b"defghij"}), val_fraction=0.25)

    def documents(split, start, stop):
        return [tuple(one.values()) for one in cache.documents(split, start=start, stop=stop)]

    assert documents("train", 0, 4) == [("a.txt", 0, 4)]
    assert documents("train", 3, 5) == [("a.txt", 3, 1), ("b.txt", 0, 1)]
    assert documents("val", 0, 3) == [("b.txt", 0, 3)]


def test_twenty_documents_are_split_as_complete_documents_and_disjoint(make_corpus):
    contents = {f"{i:02d}.txt": f"document {i:02d}".encode() for i in range(40)}
    cache = make(make_corpus(contents))
    rows = [json.loads(row) for row in (cache.folder / "documents.jsonl").open()]
    names = {s: {row["name"] for row in rows if row["split"] == s} for s in ("train", "val")}
    assert not names["train"] & names["val"]
    assert names["train"] | names["val"] == set(contents)
    assert len(names["val"]) == 4
    for row in rows:
        begin, end = row["offset"], row["offset"] + row["num_tokens"]
        expected = [*contents[row["name"]], 256]
        assert read(cache, row["split"])[begin:end].tolist() == expected


def test_the_unigram_entropy_is_that_of_smoothed_training_frequencies(make_corpus):
    cache = make(make_corpus({"a.txt": b"aaabab"}), val_fraction=3 / 7)  # aaab | ab and the end
    total = 4 + 257
    expected = -(math.log(4 / total) + math.log(2 / total) + math.log(1 / total)) / 3
    assert cache.meta.unigram_entropy_nats == pytest.approx(expected, rel=1e-12)


def test_a_second_start_reads_what_the_first_wrote(make_corpus):
    corpus = make_corpus({"a.txt": b"some text"})
    first = make(corpus)
    before = first.path("train").stat()
    assert make(corpus).path("train").stat() == before
    assert make(corpus, val_fraction=0.2).folder != first.folder


@pytest.mark.parametrize(("name", "content"), [("texts.npy", b"\x93NUMPY\x01"), ("documents.jsonl", b"{bad\n")])
def test_a_damaged_index_of_the_documents_is_replaced(make_corpus, name, content):
    corpus = make_corpus({"a.txt": b"text " * 100})
    cache = make(corpus)
    whole = (cache.folder / name).read_bytes()
    (cache.folder / name).write_bytes(content)
    assert (make(corpus).folder / name).read_bytes() == whole


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("damage", [lambda whole: whole[:-2], lambda whole: b"\xff\xff" + whole[2:]])
def test_a_damaged_cache_is_replaced(make_corpus, split, damage):
    corpus = make_corpus({"a.txt": b"some text"})
    cache = make(corpus)
    whole = cache.path(split).read_bytes()
    cache.path(split).write_bytes(damage(whole))
    assert make(corpus).path(split).read_bytes() == whole
    assert len(tokens_folders(corpus.cache_dir.parent)) == 1


def test_an_error_leaves_nothing_in_the_cache(make_corpus, tmp_path):
    with pytest.raises(ConfigError, match="byte 4 is not UTF-8"):
        make(make_corpus({"a.txt": b"good", "b.txt": b"bad \xff"}))
    assert tokens_folders(tmp_path) == []


def test_a_killed_process_leaves_no_broken_cache_and_the_next_start_succeeds(tmp_path, text):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(text(1_500_000, seed=i), encoding="utf-8")
    process = start(tmp_path)
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("cache/tokens/.*/train.bin")))
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [path.name[0] for path in tokens_folders(tmp_path)] == ["."]  # the leftover only
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))

    again = start(tmp_path)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    folder, num_train, num_val = output.split()
    assert [path.name for path in tokens_folders(tmp_path)] == [folder]
    assert (tmp_path / "cache/tokens" / folder / "train.bin").stat().st_size == 2 * int(num_train)
    assert int(num_val) > 0


def test_two_processes_that_start_at_once_write_one_complete_cache(tmp_path, text):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(text(300_000, seed=i), encoding="utf-8")
    processes = [start(tmp_path), start(tmp_path)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert [path.name for path in tokens_folders(tmp_path)] == [outputs[0].split()[0]]


def test_a_second_machine_without_this_cache_writes_the_same_bytes(tmp_path, text):
    digests = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.txt").write_text(text(200_000), encoding="utf-8")
        process = start(folder)
        process.communicate(timeout=60)
        (tokens,) = tokens_folders(folder)
        digests.append((tokens.name, hashlib.sha256((tokens / "train.bin").read_bytes()).hexdigest()))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"dtype": "uint16"}'])
def test_a_damaged_description_of_the_tokens_is_written_again(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_text("some text\n" * 50, encoding="utf-8")
    corpus = Corpus([Document.of(path, name="a.txt")], cache_dir=tmp_path / "cache")
    cache = cached_tokens(corpus, byte_tokenizer(), val_fraction=0.1, num_processes=1)
    (cache.folder / "meta.json").write_text(content, encoding="utf-8")
    again = cached_tokens(corpus, byte_tokenizer(), val_fraction=0.1, num_processes=1)
    assert again.meta == cache.meta
