"""Tokens do not depend on processes or cuts, and memory does not depend on the size of the text."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recipes.data.text import token_cache as module
from recipes.data.text.corpus import PIECE_BYTES
from recipes.data.text.token_cache import num_workers, tokenize
from recipes.errors import ConfigError
from recipes.tokenizer.bpe import train_bpe
from recipes.tokenizer.bytes import byte_tokenizer

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def bpe():
    words = [f"def name_{i}(self): return {i} + value\n\n    x = 'ba ko ti 漢 é'\n" for i in range(300)]
    return train_bpe(iter(words), vocab_size=600)


def tokens_of(corpus, tokenizer, **settings):
    results = list(tokenize(corpus, tokenizer, dtype="uint16", **settings))
    names = [piece.document.name for piece, _ in results]
    return names, np.concatenate([tokens for _, tokens in results])


def test_two_processes_give_the_tokens_of_one_in_the_same_order(make_corpus, text, bpe, monkeypatch):
    monkeypatch.setattr(module, "_MIN_BYTES_PER_PROCESS", 1)
    contents = {f"{i}.txt": text(PIECE_BYTES // 4 + i, seed=i).encode() for i in range(9)}
    corpus = make_corpus(contents | {"long.txt": text(PIECE_BYTES + 9).encode()})
    one_names, one = tokens_of(corpus, bpe, num_processes=1)
    two_names, two = tokens_of(corpus, bpe, num_processes=2)
    assert one_names == two_names
    assert np.array_equal(one, two)


def test_a_cut_document_has_the_tokens_of_the_whole_text(make_corpus, text, bpe):
    long = text(2 * PIECE_BYTES + 100)
    corpus = make_corpus({"long.txt": long.encode()})
    assert len(list(corpus.pieces())) == 2
    for tokenizer in (bpe, byte_tokenizer()):
        _, tokens = tokens_of(corpus, tokenizer, num_processes=1)
        assert np.array_equal(tokens, tokenizer.encode_array(long))


def test_an_error_of_a_worker_is_the_error_of_the_caller(make_corpus, text, bpe, monkeypatch):
    monkeypatch.setattr(module, "_MIN_BYTES_PER_PROCESS", 1)
    contents = {f"{i}.txt": text(PIECE_BYTES // 2).encode() for i in range(4)}
    corpus = make_corpus(contents | {"z.txt": b"ab\xff"})
    with pytest.raises(ConfigError) as caught:
        tokens_of(corpus, bpe, num_processes=2)
    assert caught.value.setting.endswith("z.txt")
    assert caught.value.reason == "byte 2 is not UTF-8 text (invalid start byte)"


def test_short_text_starts_no_process():
    assert num_workers(10_000, byte_tokenizer(), num_processes=8) == 1
    assert num_workers(100 * 1024**2, byte_tokenizer(), num_processes=8) == 1
    assert num_workers(10 * 1024**3, byte_tokenizer(), num_processes=8) == 8


def test_a_worker_imports_neither_torch_nor_lightning():
    code = "import sys, recipes.data.text.token_cache; print({'torch', 'lightning'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"


MEMORY_SCRIPT = """
import resource, sys
from pathlib import Path
from recipes.data.text.corpus import Corpus, Document
from recipes.data.text.token_cache import cached_tokens
from recipes.tokenizer.bytes import byte_tokenizer

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def run(name):
    path = Path(sys.argv[1], name)
    corpus = Corpus([Document.of(path, name=name)], cache_dir=Path(sys.argv[1], "cache"))
    return cached_tokens(corpus, byte_tokenizer(), val_fraction=0.1, num_processes=1)

run("small.txt")
before = peak_mib()
cache = run("large.txt")
print(cache.meta.num_train_tokens + cache.meta.num_val_tokens, peak_mib() - before)
"""


def test_64_mib_in_one_document_need_less_than_24_mib_more_than_4(tmp_path, text):
    block = text(4 * 1024**2).encode()
    (tmp_path / "small.txt").write_bytes(block)
    with (tmp_path / "large.txt").open("wb") as file:
        for _ in range(16):
            file.write(block)
    output = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    num_tokens, growth_mib = output.split()
    assert int(num_tokens) == 16 * len(block) + 1
    assert float(growth_mib) < 24
