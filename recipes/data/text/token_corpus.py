"""Protocol of a corpus to tokenize: ordered documents in pieces, with a hash and a validation split."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from recipes.tokenizer import TextCorpus


class TextPiece(Protocol):
    """A part of a document, or all of it; picklable."""

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def ends_document(self) -> bool: ...
    def read(self) -> str: ...
    def text_key(self) -> int:
        """Return a hash of the text of the whole document, equal for equal texts of any source."""


class TokenCorpus(TextCorpus, Protocol):
    """Documents in the order of tokenization."""

    @property
    def num_bytes(self) -> int: ...
    def pieces(self, *, cut: bool = True) -> Iterator[TextPiece]:
        """Yield all documents; with `cut=False`, one piece per document."""

    def make_split(self, val_fraction: float) -> Callable[[Any], bool]:
        """Return a predicate for pieces of validation documents; if there are none, the tail of the tokens is used."""

    def check_unchanged(self) -> None:
        """Check that the documents have not changed since they were hashed."""


def hash_text(text: str) -> int:
    """Return the hash of a text that says which texts are equal, in 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
