"""Bytes: ids are byte values, here and in transformers."""

import pickle

import pytest

from recipes.tokenizer import Tokenizer, byte_alphabet
from recipes.tokenizer.bytes import byte_tokenizer

TEXTS = [
    "",
    "plain",
    "a\r\nb\tc  \n\n",
    "é ß 漢字 😀👩‍👩‍👧",
    "NUL \0 and \x7f and \ufeff",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_an_id_is_the_value_of_its_byte_and_decoding_gives_the_text(tokenizer, text):
    assert tokenizer.encode(text) == list(text.encode("utf-8"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_there_are_257_ids_and_the_last_ends_a_document(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert tokenizer.decode([104, 105, 256]) == "hi<|endoftext|>"


def test_a_special_token_in_a_text_is_text(tokenizer):
    assert tokenizer.encode("<|endoftext|>") == list(b"<|endoftext|>")


def test_the_fast_path_gives_what_the_library_gives(tokenizer):
    for text in TEXTS:
        slow = tokenizer._backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == slow


def test_transformers_loads_it_and_gives_the_same_ids(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in TEXTS:
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == 256
    assert len(theirs) == 257


def test_saving_loading_and_pickling_keep_everything(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for copy in (Tokenizer.load(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.fingerprint == tokenizer.fingerprint
        assert copy.end_of_text == 256
        assert copy.is_bytes
        assert copy.encode("é") == [195, 169]


def test_a_text_may_be_cut_at_lines(tokenizer):
    assert tokenizer.splits_at_lines
