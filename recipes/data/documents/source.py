"""Text source of documents stored as rows of files or of a dataset; also gives `mode=prepare` the rows."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from recipes.cache import open_cache_dir
from recipes.data.documents.rows import RowCorpus
from recipes.data.read_rows import Rows, check_split, open_rows
from recipes.data.text.source import TextSource
from recipes.data.text.token_corpus import TokenCorpus
from recipes.errors import ConfigError


class Documents(TextSource):
    """One document per row of `path`: JSONL, JSON, CSV, Parquet and text files, or a hub dataset."""

    def __init__(self, *, path: str, text_field: str, domain_field: str | None, split: str, **settings: Any) -> None:
        """Store the settings; nothing is read before `prepare`.

        Args:
            path: File, folder or glob, or `hf://` and a dataset id.
            text_field: Name of the field that holds the text.
            domain_field: Name of the field that holds the domain of the text, for `mode=prepare`; None: one domain.
            split: Split of a hub dataset.
            **settings: As for `TextSource`.
        """
        super().__init__(**settings)
        check_split(split, {"data.path": path})
        if not text_field:
            raise ConfigError(
                "data.text_field=", "it is empty, and names no field", "data.text_field=<name of a field>"
            )
        self.text_field = text_field
        self.domain_field = domain_field
        self.path = path
        self._hub_split = split

    def open_rows(self, fields: Sequence[str] | None = None) -> Rows:
        """Return the rows, with all fields or, where others need not be read, with some.

        Raises:
            ConfigError: There are none.
        """
        return open_rows(
            self.path, setting="data.path", split=self._hub_split, text_field=self.text_field, fields=fields
        )

    @override
    def make_corpus(self) -> TokenCorpus:
        rows = self.open_rows([self.text_field])
        cache_dir = open_cache_dir(self._cache_dir)
        return RowCorpus(rows, text_field=self.text_field, cache_dir=cache_dir, open_all=self.open_rows)

    @override
    def suggest_more_text(self) -> str:
        return "data.path=<more documents>"
