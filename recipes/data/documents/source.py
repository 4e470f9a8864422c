"""Training on documents that are rows of files or of a data set, and the rows themselves for `mode=prepare`."""

from typing import Any

from typing_extensions import override

from recipes.cache import open_cache_dir
from recipes.data.documents.rows import RowCorpus
from recipes.data.read_rows import Rows, open_rows
from recipes.data.text.source import TextSource
from recipes.data.text.token_corpus import TokenCorpus


class Documents(TextSource):
    """Rows of `path`: JSONL, JSON, parquet and text files, or a data set of the hub; one document each."""

    def __init__(
        self, *, path: str, text_field: str, domain_field: str | None, hub_split: str, **settings: Any
    ) -> None:
        """Store the settings; nothing is read before `prepare`.

        Args:
            path: File, folder or glob, or `hf://` and the id of a data set.
            text_field: Name of the field that holds the text.
            domain_field: Name of a field that says what kind of text it is, for `mode=prepare`; None: all are one kind.
            hub_split: Split of a data set of the hub.
            **settings: As of `TextSource`.
        """
        super().__init__(**settings)
        self.text_field = text_field
        self.domain_field = domain_field
        self._path = path
        self._hub_split = hub_split

    def open_rows(self) -> Rows:
        """Return the rows.

        Raises:
            ConfigError: There are none.
        """
        return open_rows(self._path, setting="data.path", hub_split=self._hub_split, text_field=self.text_field)

    @override
    def make_corpus(self) -> TokenCorpus:
        return RowCorpus(self.open_rows(), text_field=self.text_field, cache_dir=open_cache_dir(self._cache_dir))

    @override
    def suggest_more_text(self) -> str:
        return "data.path=<more documents>"
