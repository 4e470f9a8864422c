"""What every source of text does: list, make the tokenizer, tokenize once, cut windows."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from recipes.cache import open_cache_dir
from recipes.data.text.corpus import Corpus, Document
from recipes.data.text.sequences import TokenWindows, check_length
from recipes.data.text.token_cache import Split, TokenCache, cached_tokens
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer, TokenizerConfig


class TextSource(ABC):
    """Documents -> windows of tokens; a subclass says which documents."""

    def __init__(
        self,
        *,
        tokenizer: TokenizerConfig,
        seq_len: int,
        val_fraction: Annotated[float, "> 0, < 0.9"],
        cache_dir: str,
        vocab_size: int | None = None,
        num_processes: int | None = None,
    ) -> None:
        """Take the settings; nothing is read before `prepare`.

        Args:
            tokenizer: Makes the tokenizer, from this text if it is trained.
            seq_len: Tokens a sample.
            val_fraction: Share of the text held out: whole documents where there are 20 or more, else the tail.
            cache_dir: Where tokens and tokenizers are kept.
            vocab_size: Ids that the model knows; None: any number.
            num_processes: That tokenize; None: one a core.

        Raises:
            ConfigError: `seq_len` or `val_fraction` is out of range, or there is no tokenizer.
        """
        check_windows(seq_len=seq_len, val_fraction=val_fraction)
        if not hasattr(tokenizer, "make"):
            raise ConfigError("tokenizer=none", "text needs a tokenizer", "tokenizer=bpe or =bytes")
        self.seq_len = seq_len
        self.val_fraction = val_fraction
        self._tokenizer_config = tokenizer
        self._cache_dir = cache_dir
        self._known_ids = vocab_size
        self._num_processes = num_processes
        self._prepared: tuple[Tokenizer, TokenCache] | None = None

    @abstractmethod
    def list_documents(self) -> Sequence[Document]:
        """The files to read, in a fixed order.

        Raises:
            ConfigError: There are none.
        """

    @abstractmethod
    def more_text(self) -> str:
        """What to type for more text, where there is too little."""

    def prepare(self) -> None:
        """Tokenize what has not been tokenized before; the second call does nothing.

        Raises:
            ConfigError: No text, text that is not UTF-8, a tokenizer with more ids than the model knows, or too
                little text for one sample of each split.
        """
        if self._prepared is not None:
            return
        corpus = Corpus(self.list_documents(), cache_dir=open_cache_dir(self._cache_dir))
        tokenizer = self._tokenizer_config.make(corpus)
        if self._known_ids is not None and tokenizer.vocab_size > self._known_ids:
            raise ConfigError(
                f"model.vocab_size={self._known_ids}",
                f"the tokenizer has {tokenizer.vocab_size} tokens",
                f"model.vocab_size={tokenizer.vocab_size}",
            )
        cache = cached_tokens(
            corpus, tokenizer, val_fraction=self.val_fraction, num_processes=self._num_processes
        )
        self._prepared = tokenizer, cache
        self.train()
        self.val()

    def train(self) -> TokenWindows:
        """The training samples."""
        return check_length(self._windows("train"), split="training", fix=self.more_text())

    def val(self) -> TokenWindows:
        """The validation samples, the same for every seed."""
        fix = f"a larger data.val_fraction, or {self.more_text()}"
        return check_length(self._windows("val"), split="validation", fix=fix)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, after `prepare`."""
        return self._ready()[0]

    @property
    def cache(self) -> TokenCache:
        """The tokens on disk and their numbers, after `prepare`."""
        return self._ready()[1]

    @property
    def fingerprint(self) -> str:
        """The same for the same tokens in the same split."""
        meta = self.cache.meta
        return f"{meta.content_hash}/{meta.tokenizer_fingerprint}/{meta.val_fraction}"

    def describe(self) -> str:
        """How much text, and what a model that knows nothing but token frequencies would reach."""
        meta = self.cache.meta
        counts = f"{meta.num_train_tokens:,} training and {meta.num_val_tokens:,} validation tokens"
        entropy = meta.unigram_entropy_nats
        known = "" if entropy is None else f"; unigram entropy {entropy:.3f} nats"
        return f"{meta.num_documents:,} documents, {counts}{known}"

    def describe_sample(self, sample: int) -> dict[str, Any]:
        """Where a training sample was cut from, and its text: evidence about a bad batch."""
        start = sample * self.seq_len
        documents = self.cache.documents("train", start=start, stop=start + self.seq_len + 1)
        tokens = self.train()[sample]["inputs"].tolist()
        return {"documents": documents, "text": self.tokenizer.decode(tokens)}

    def _ready(self) -> tuple[Tokenizer, TokenCache]:
        assert self._prepared is not None, "prepare() comes first"
        return self._prepared

    def _windows(self, split: Split) -> TokenWindows:
        return TokenWindows(
            self.cache.path(split),
            dtype=self.cache.meta.dtype,
            seq_len=self.seq_len,
            start=0,
            stop=self.cache.num_tokens(split),
        )


def check_windows(*, seq_len: int, val_fraction: float) -> None:
    """Refuse lengths and shares that no data could have.

    Raises:
        ConfigError: Out of range.
    """
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len}", "a sample has at least one token", "seq_len=256")
    if not 0.0 < val_fraction < 1.0:
        raise ConfigError(
            f"data.val_fraction={val_fraction}",
            "a share between 0 and 1 is held out, and something must be left on both sides",
            "data.val_fraction=0.05",
        )


def list_files(
    folder: Path, *, suffixes: frozenset[str], skipped_folders: frozenset[str] = frozenset()
) -> list[Path]:
    """Files with one of the suffixes, sorted by relative path; nothing hidden."""
    found = []
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = [
            name for name in subfolders if name not in skipped_folders and not name.startswith(".")
        ]
        for name in names:
            path = Path(directory, name)
            if path.suffix.lower() in suffixes and not name.startswith("."):
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).parts)
