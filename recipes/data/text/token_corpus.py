"""What can be tokenized: documents in order, in pieces, with a hash and a validation split."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol


class TextPiece(Protocol):
    """A part of a document, or all of it; picklable."""

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def ends_document(self) -> bool: ...
    def read(self) -> str: ...


class TokenCorpus(Protocol):
    """Documents that are tokenized in their order."""

    @property
    def cache_dir(self) -> Path: ...
    @property
    def content_hash(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    def texts(self, max_bytes: int) -> Iterator[str]: ...
    def pieces(self, *, cut: bool = True) -> Iterator[TextPiece]:
        """Yield all documents; with `cut=False`, one piece per document."""

    def make_split(self, val_fraction: float) -> Callable[[Any], bool]:
        """Return whether the document of a piece is for validation. If none is, the tail of the tokens will be."""

    def check_unchanged(self) -> None:
        """Check that what was read is what was hashed."""
