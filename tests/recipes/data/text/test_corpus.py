"""Cuts, hashes and splits of a corpus depend on its content alone."""

import os
import time
from itertools import pairwise

import pytest

from recipes.data.text import corpus as corpus_module
from recipes.data.text.corpus import PIECE_BYTES, Corpus, Document, content_digests
from recipes.data.text.token_corpus import hash_text
from recipes.errors import ConfigError


def test_joined_pieces_equal_the_documents(make_corpus, text):
    long = text(3 * PIECE_BYTES)
    corpus = make_corpus({"a.txt": b"first", "b.txt": long.encode(), "empty.txt": b""})
    pieces = list(corpus.pieces())
    assert [piece.document.name for piece in pieces if piece.ends_document] == ["a.txt", "b.txt"]
    assert "".join(piece.read() for piece in pieces) == "first" + long
    assert max(piece.stop - piece.start for piece in pieces) <= 2 * PIECE_BYTES
    assert len(pieces) == 4


def test_a_byte_order_mark_at_the_start_of_a_file_is_no_text(make_corpus):
    marked, plain = (
        list(make_corpus({"a.txt": mark + b"first \xef\xbb\xbf"}).pieces()) for mark in (b"\xef\xbb\xbf", b"")
    )
    assert [piece.read() for piece in marked] == [piece.read() for piece in plain] == ["first \ufeff"]
    assert marked[0].text_key() == plain[0].text_key() == hash_text("first \ufeff")


def test_a_cut_stands_between_two_lines_that_begin_at_the_margin(make_corpus, text):
    data = text(3 * PIECE_BYTES).encode()
    corpus = make_corpus({"b.txt": data})
    cuts = [piece.stop for piece in corpus.pieces()][:-1]
    assert cuts
    for cut in cuts:
        assert data[cut - 1 : cut] == b"\n"
        assert not data[cut - 2 : cut - 1].isspace()
        assert not data[cut : cut + 1].isspace()


def test_one_endless_line_is_cut_between_characters(make_corpus):
    line = "漢" * (PIECE_BYTES * 4 // 3)
    corpus = make_corpus({"line.txt": line.encode()})
    assert "".join(piece.read() for piece in corpus.pieces()) == line
    assert len(list(corpus.pieces())) > 1


def test_the_hash_is_of_names_and_contents_not_of_dates_and_folders(make_corpus):
    first = make_corpus({"a.txt": b"one", "b.txt": b"two"}).content_hash
    corpus = make_corpus({"a.txt": b"one", "b.txt": b"two"})
    os.utime(corpus.documents[0].path, (1, 1))
    assert corpus.content_hash == first
    assert make_corpus({"a.txt": b"one", "b.txt": b"twO"}).content_hash != first
    assert make_corpus({"a.txt": b"one", "c.txt": b"two"}).content_hash != first
    assert make_corpus({"a.txt": b"onet", "b.txt": b"wo"}).content_hash != first


def test_a_file_name_may_be_any_bytes(make_corpus):
    name = os.fsdecode(b"caf\xe9.txt")
    corpus = make_corpus({name: b"text"})
    assert len(corpus.content_hash) == 32
    assert list(corpus.texts(100)) == ["text"]


def test_cached_digests_equal_the_hash_of_the_content(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "MIN_BYTES_TO_REMEMBER", 1)
    monkeypatch.setattr(corpus_module, "_SETTLED_NS", -(10**12))  # no test can set the time of the last change
    path = tmp_path / "a.txt"
    path.write_bytes(b"one")
    os.utime(path, (1000, 1000))

    def digest():
        return content_digests([Document.of(path, name="a.txt")], cache_dir=tmp_path / "cache")[0]

    first = digest()
    monkeypatch.setattr(corpus_module, "file_digest", lambda _: pytest.fail("read again"))
    assert digest() == first
    monkeypatch.undo()
    monkeypatch.setattr(corpus_module, "MIN_BYTES_TO_REMEMBER", 1)
    path.write_bytes(b"two")
    os.utime(path, (2000, 2000))
    assert digest() != first


def test_the_digest_of_a_file_that_has_just_changed_is_not_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "MIN_BYTES_TO_REMEMBER", 1)
    path = tmp_path / "a.txt"
    path.write_bytes(b"one")
    state = [Document("a.txt", path, 3, time.time_ns())]
    first = content_digests(state, cache_dir=tmp_path)
    path.write_bytes(b"two")
    assert content_digests(state, cache_dir=tmp_path) != first


def test_the_split_holds_out_about_the_fraction_and_no_copy_of_a_training_file(make_corpus, text):
    contents = {f"{i:03d}.txt": text(900 + i, seed=i).encode() for i in range(200)}
    contents |= {f"copy/{name}": content for name, content in contents.items()}
    corpus = make_corpus(contents)
    held_out = corpus.val_documents(0.1)
    share = sum(d.num_bytes for d in corpus.documents if d.name in held_out) / corpus.num_bytes
    assert 0.1 <= share < 0.11
    assert all((f"copy/{name}" in held_out) == (name in held_out) for name in contents if "/" not in name)


def test_a_new_document_leaves_the_others_in_their_split(make_corpus, text):
    contents = {f"{i:03d}.txt": text(1000, seed=i).encode() for i in range(300)}
    before = make_corpus(contents).val_documents(0.1)
    after = make_corpus(contents | {"new.txt": text(1000, seed=999).encode()}).val_documents(0.1)
    assert len(before ^ after) <= 2


def test_few_documents_or_large_ones_leave_the_split_to_the_tail(make_corpus):
    few = make_corpus({f"{i}.txt": b"text" * 10 + bytes([65 + i]) for i in range(19)})
    assert few.val_documents(0.5) == frozenset()
    coarse = make_corpus({f"{i}.txt": b"text" * 10 + bytes([65 + i]) for i in range(20)})
    assert coarse.val_documents(0.01) == frozenset()


def test_a_sample_for_training_is_spread_over_the_whole_text(make_corpus, text):
    contents = {f"{i:03d}.txt": (f"{i:03d}" + text(1000)).encode() for i in range(100)}
    corpus = make_corpus(contents)
    numbers = [int(part[:3]) for part in corpus.texts(corpus.num_bytes // 10)]
    assert 9 <= len(numbers) <= 11
    assert max(b - a for a, b in pairwise(numbers)) <= 12
    assert len(list(corpus.texts(corpus.num_bytes))) == 100


def test_bytes_that_are_not_utf8_are_named_with_their_offset(make_corpus, text):
    good = text(2 * PIECE_BYTES).encode()
    corpus = make_corpus({"bad.txt": good + b"caf\xe9 \n"})
    with pytest.raises(ConfigError) as caught:
        list(corpus.texts(corpus.num_bytes))
    assert str(caught.value) == (
        f"data.path={corpus.documents[0].path}: byte {len(good) + 3} is not UTF-8 text "
        f"(invalid continuation byte); type iconv -c -f utf-8 -t utf-8 < {corpus.documents[0].path} > <new file>, "
        "then its path; it leaves out such bytes"
    )


def test_a_file_that_changes_while_it_is_read_is_rejected(make_corpus):
    corpus = make_corpus({"a.txt": b"one"})
    corpus.check_unchanged()
    corpus.documents[0].path.write_bytes(b"other")
    with pytest.raises(ConfigError, match="changed while it was being read"):
        Corpus(corpus.documents, cache_dir=corpus.cache_dir).check_unchanged()
