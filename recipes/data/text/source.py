"""Base classes of text sources: list documents, make the tokenizer, tokenize once, cut windows."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from recipes.cache import open_cache_dir
from recipes.data.text.corpus import MIN_DOCUMENTS_TO_SPLIT, Corpus, Document
from recipes.data.text.sequences import TokenWindows, check_splits
from recipes.data.text.token_cache import Split, TokenCache, cached_tokens, describe_start, hold_out
from recipes.data.text.token_corpus import TokenCorpus
from recipes.errors import ConfigError
from recipes.files import count
from recipes.tokenizer import TextCorpus, Tokenizer, TokenizerConfig

LOGGER = logging.getLogger("lightning_recipes")


class TextSource(ABC):
    """Documents -> token windows; a subclass lists the documents."""

    sample_kind: ClassVar[str] = "tokens"

    def __init__(
        self,
        *,
        tokenizer: TokenizerConfig,
        seq_len: Annotated[int, ">= 1"],
        val_fraction: Annotated[float, "> 0, < 0.9"],
        cache_dir: str,
        vocab_size: Annotated[int, ">= 1"] | None = None,
        num_processes: Annotated[int, ">= 1, <= 256"] | None = None,
    ) -> None:
        """Check the settings; nothing is read before `prepare`.

        Args:
            tokenizer: Config of the tokenizer, which is trained on this text if necessary.
            seq_len: Tokens per sample.
            val_fraction: Fraction of the text for validation: complete documents if there are 20 or more, otherwise
                the tail.
            cache_dir: Folder of cached tokens and tokenizers.
            vocab_size: Vocabulary size of the model; None: any.
            num_processes: Processes that tokenize; None: one per core.

        Raises:
            ConfigError: `seq_len` or `val_fraction` is out of range, or there is no tokenizer.
        """
        check_windows(seq_len=seq_len, val_fraction=val_fraction)
        if not hasattr(tokenizer, "make"):
            raise ConfigError("tokenizer=none", "text needs a tokenizer", "tokenizer=bpe or tokenizer=bytes")
        self.seq_len = seq_len
        self.val_fraction = val_fraction
        self._tokenizer_config = tokenizer
        self._cache_dir = cache_dir
        self._known_ids = vocab_size
        self._num_processes = num_processes
        self._corpus: TokenCorpus | None = None
        self._prepared: tuple[Tokenizer, TokenCache] | None = None

    @abstractmethod
    def make_corpus(self) -> TokenCorpus:
        """Return the documents, in a fixed order.

        Raises:
            ConfigError: There are none.
        """

    @abstractmethod
    def suggest_more_text(self) -> str:
        """Return the override that gives more text, for the error about too little text."""

    def corpus(self) -> TokenCorpus:
        """Return the text, with a hash of it.

        Raises:
            ConfigError: There is no text.
        """
        if self._corpus is None:
            self._corpus = self.make_corpus()
        return self._corpus

    def make_tokenizer(self, corpus: TextCorpus) -> Tokenizer:
        """Return the configured tokenizer, trained on `corpus` if necessary."""
        return self._tokenizer_config.make(corpus)

    def prepare(self, tokenizer: Tokenizer | None = None) -> None:
        """Tokenize the text unless it is cached; a second call does nothing.

        Args:
            tokenizer: Tokenizer shared with other data; None: the configured one.

        Raises:
            ConfigError: There is no text, it is not UTF-8, the tokenizer has more ids than the model, or the text is
                too short for one sample per split.
        """
        if self._prepared is not None:
            return
        corpus = self.corpus()
        tokenizer = tokenizer or self.make_tokenizer(corpus)
        tokenizer.check_model(self._known_ids)
        cache = cached_tokens(corpus, tokenizer, val_fraction=self.val_fraction, num_processes=self._num_processes)
        if cache.meta.num_documents == 0:
            typed = getattr(self, "path", None)
            setting = "data" if typed is None else f"data.path={typed}"
            raise ConfigError(setting, "no document in it has any text", self.suggest_more_text())
        self._prepared = tokenizer, cache
        self._check_splits()
        self._warn_of_copies()

    def hold_out_all(self) -> None:
        """Use the whole text for validation; called before `prepare`, by modes that do not train."""
        self.val_fraction = 1.0

    def split_texts(self) -> NDArray[np.void]:
        """Return the split of each document, as `SPLIT_TEXT`; after `prepare`."""
        return self.cache.texts

    def hold_out(self, keys: NDArray[np.uint64], num_train: NDArray[np.int64]) -> int:
        """Train at most on the first tokens of some texts; what is held out is validation data.

        Args:
            keys: Sorted hashes of the texts.
            num_train: Tokens of each to train on.

        Returns:
            The number of documents that were trained on further than that.

        Raises:
            ConfigError: A split is shorter than one sample.
        """
        tokenizer, cache = self._ready()
        texts = np.array(cache.texts)
        place = np.minimum(np.searchsorted(keys, texts["key"]), len(keys) - 1)
        limit = np.where(keys[place] == texts["key"], num_train[place], texts["num_train"])
        num_held_out = int((limit < texts["num_train"]).sum())
        if num_held_out:
            self._prepared = tokenizer, hold_out(cache, np.minimum(limit, texts["num_train"]))
            self._check_splits()
        return num_held_out

    def train(self) -> TokenWindows:
        """Return the training samples."""
        return self._windows("train")

    def val(self) -> TokenWindows:
        """Return the validation samples, the same for every seed."""
        return self._windows("val")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, after `prepare`."""
        return self._ready()[0]

    @property
    def cache(self) -> TokenCache:
        """The tokens on disk and their statistics, after `prepare`."""
        return self._ready()[1]

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal tokens in the same split."""
        meta = self.cache.meta
        own = f"{meta.content_hash}/{meta.tokenizer_fingerprint}/{meta.val_fraction}"
        return own + (f"/{meta.held_out}" if meta.held_out else "") + describe_start(self.tokenizer)

    @property
    def val_fingerprint(self) -> str:
        """String that is equal for equal validation samples."""
        meta = self.cache.meta
        return f"{meta.tokenizer_fingerprint}/{meta.val_hash}/{self.seq_len}" + describe_start(self.tokenizer)

    def describe(self) -> str:
        """Return the amount of text, and the unigram loss."""
        meta = self.cache.meta
        counts = f"{meta.num_train_tokens:,} training and {count(meta.num_val_tokens, 'validation token')}"
        entropy = meta.unigram_entropy_nats
        has_baseline = entropy is not None and meta.num_train_tokens > 0  # of nothing, all tokens are equally frequent
        baseline = f"; unigram entropy {entropy:.3f} nats" if has_baseline else ""
        return f"{count(meta.num_documents, 'document')}, {counts}{baseline}"

    def describe_sample(self, sample: int) -> dict[str, Any]:
        """Return the documents and the text of a training sample, for the dump of a bad batch."""
        start = sample * self.seq_len
        documents = self.cache.documents("train", start=start, stop=start + self.seq_len + 1)
        tokens = self.train()[sample]["inputs"].tolist()
        return {"documents": documents, "text": self.tokenizer.decode(tokens)}

    def _check_splits(self) -> None:
        """Check that both splits have at least one sample; only the validation split if it has all text."""
        train, val = self.train(), self.val()
        holds_out_all = self.val_fraction >= 1
        check_splits(
            val if holds_out_all else train,
            val,
            val_fraction=None if holds_out_all else self.val_fraction,
            cuts=isinstance(self._corpus, Corpus) and self.cache.meta.num_documents < MIN_DOCUMENTS_TO_SPLIT,
            more=self.suggest_more_text(),
        )

    def _warn_of_copies(self) -> None:
        """Log how many validation documents are copies of training documents, where the split is the tail of all text.

        Splits of complete documents have no copies in both.
        """
        texts = self.cache.texts
        is_val = texts["num_train"] < texts["num_tokens"]
        first = int(np.argmax(is_val))
        if not is_val[first:].all():
            return
        num_copies = int(np.isin(texts["key"][first:], texts["key"][:first]).sum())
        if num_copies:
            LOGGER.warning(
                "The validation split is the tail of the text, as no whole documents of about data.val_fraction=%s are"
                " found: %s of it %s also trained on, as %s, so its loss is too low",
                *(self.val_fraction, count(num_copies, "document"), "is" if num_copies == 1 else "are"),
                "a copy" if num_copies == 1 else "copies",
            )

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
            vocab_size=self.cache.meta.vocab_size,
        )


class FileSource(TextSource):
    """Text files, one document each; a subclass lists them."""

    @abstractmethod
    def list_documents(self) -> Sequence[Document]:
        """Return the files to read, in a fixed order.

        Raises:
            ConfigError: There are no files.
        """

    @override
    def make_corpus(self) -> TokenCorpus:
        # list documents first: the cache folder is created only if there is something to read
        return Corpus(self.list_documents(), cache_dir=open_cache_dir(self._cache_dir))


def check_windows(*, seq_len: int, val_fraction: float) -> None:
    """Check sample length and validation fraction.

    Args:
        seq_len: Tokens per sample, at least 1.
        val_fraction: Between 0 and 1, exclusive.

    Raises:
        ConfigError: A value is out of range.
    """
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len}", "a sample has at least one token", "seq_len=256")
    if not 0.0 < val_fraction < 1.0:
        raise ConfigError(
            f"data.val_fraction={val_fraction}",
            "it is the fraction of the text for validation, and both splits need text",
            "data.val_fraction=0.05",
        )
