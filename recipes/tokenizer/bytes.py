"""Bytes as tokens: no training, works for any text, 257 ids; sequences are ~4 times as long as with BPE."""

from typing import ClassVar

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from recipes.tokenizer import END_OF_TEXT, NUM_BYTES, TextCorpus, Tokenizer, byte_alphabet


class Bytes:
    """Token ids are UTF-8 byte values; 256 is end-of-text."""

    own_ids: ClassVar[bool] = True  # of no published model
    vocab_size: ClassVar[int] = 257  # a literal, because the config check reads it without importing

    def make(self, corpus: TextCorpus) -> Tokenizer:
        """Return the same tokenizer for every corpus."""
        return byte_tokenizer()


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level vocabulary without merges."""
    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(backend, end_of_text=NUM_BYTES)
