"""BPE: merges are learned from the corpus, and decoding restores any text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.data.text.corpus import Corpus, Document
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer
from recipes.tokenizer.bpe import Bpe, train_bpe

ROOT = Path(__file__).parents[3]

TEXTS = [
    "",
    "def f(x):\n    return x + 1\n",
    "a\r\nb\tc  \n\n  \r\n",
    "é ß 漢字 😀👩‍👩‍👧 \u00a0\u2028",
    "NUL \0 and \x7f and \ufeff",
    " leading, don't stop 12345678 ",
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "a.txt"
    lines = [f"def name_{i % 37}(self, value): return {i} + self.value_{i % 11}\n" for i in range(800)]
    path.write_text("".join(lines), encoding="utf-8")
    return Corpus([Document.of(path, name="a.txt")], cache_dir=tmp_path / "cache")


@pytest.fixture
def tokenizer(corpus):
    return Bpe(vocab_size=320).make(corpus)


def test_the_vocabulary_has_exactly_the_requested_size(tokenizer):
    assert tokenizer.vocab_size == 320
    assert tokenizer.decode([tokenizer.end_of_text]) == "<|endoftext|>"


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_token_is_longer_than_400_characters_so_that_long_words_take_linear_time():
    words = ["a" * 3000, "=" * 3000, " " * 3000, "\n" * 3000]
    tokenizer = train_bpe(words * 3, vocab_size=320)
    for text in words:
        longest = max(len(tokenizer.decode([token])) for token in tokenizer.encode(text))
        assert 100 < longest <= 400  # 200 blanks and 200 newlines are one group
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_shorten_the_text_they_were_learned_from(tokenizer):
    text = "def name_1(self, value): return 5 + self.value_1\n"
    assert len(tokenizer.encode(text)) < len(text) / 2


def test_a_special_token_in_a_text_is_text(tokenizer):
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_a_batch_has_the_ids_of_each_text(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_transformers_loads_it_and_gives_the_same_ids(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    for text in TEXTS:
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end_of_text


def test_a_second_make_loads_the_cached_tokenizer(corpus, monkeypatch):
    first = Bpe(vocab_size=300).make(corpus)
    monkeypatch.setattr("recipes.tokenizer.bpe.train_bpe", lambda *_, **__: pytest.fail("again"))
    assert Bpe(vocab_size=300).make(corpus).fingerprint == first.fingerprint


def test_another_size_is_another_tokenizer(corpus):
    assert Bpe(vocab_size=300).make(corpus).fingerprint != Bpe(vocab_size=301).make(corpus).fingerprint


def test_a_corpus_too_small_gives_fewer_ids_and_one_line_in_the_log(caplog):
    tokenizer = train_bpe(iter(["aaaa bbbb"]), vocab_size=1000)
    assert 257 < tokenizer.vocab_size < 1000
    assert len(caplog.records) == 1
    assert f"merges for {tokenizer.vocab_size} tokens only, not 1000" in caplog.text


def test_fewer_ids_than_bytes_are_rejected():
    with pytest.raises(ConfigError) as caught:
        Bpe(vocab_size=256)
    assert str(caught.value) == (
        "tokenizer.vocab_size=256: 256 bytes and the end of a document take 257 ids; "
        "type model.vocab_size=257 tokenizer=bytes, or a larger vocabulary"
    )
    assert isinstance(train_bpe(iter(["ab"]), vocab_size=257), Tokenizer)


def test_a_fork_after_training_is_silent():
    code = (
        "import os; from recipes.tokenizer.bpe import train_bpe\n"
        "train_bpe(iter(['some text ' * 1000] * 100), vocab_size=260).encode_batch(['a b'] * 9)\n"
        "pid = os.fork()\n"
        "os._exit(0) if pid == 0 else os.waitpid(pid, 0)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_in_the_cache_is_trained_again(corpus, tokenizer, file):
    [folder] = (corpus.cache_dir / "tokenizers").glob("bpe_*")
    (folder / file).write_text("{", encoding="utf-8")
    assert Bpe(vocab_size=320).make(corpus).fingerprint == tokenizer.fingerprint
    (folder / file).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{file} cannot be read: "):
        Tokenizer.load(folder)
