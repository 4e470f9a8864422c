"""Byte-level BPE (arXiv 1508.07909) trained on the corpus itself: ~8 MB/s, once per corpus."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from recipes.cache import build_once
from recipes.errors import ConfigError
from recipes.tokenizer import END_OF_TEXT, NUM_BYTES, TextCorpus, Tokenizer

log = logging.getLogger(__name__)

SMALLEST_VOCABULARY = NUM_BYTES + 1  # every byte, and the end of a document

# Merges never cross these groups. A word includes one character before it (" the", "_name", ".join"), so that code has
# few tokens; digits come in pairs; punctuation includes the newline after it; indentation is one token. Training is
# quadratic in the group length: a genome without spaces would never finish, so a group ends after 200 characters.
_MOST = "{1,200}"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}{_MOST}"
_NUMBERS = r"\p{N}{1,2}"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]{_MOST}[\r\n]{{0,200}}"
_SPACES = rf"\s{{0,200}}[\r\n]{_MOST}|\s{_MOST}(?!\S)|\s{_MOST}"
_PATTERN = "|".join((_WORDS, _NUMBERS, _SIGNS, _SPACES))

# in the name of the cache folder: increase when the same corpus produces a different tokenizer
_FORMAT = 1


class Bpe:
    """Trains exactly `vocab_size` ids, including end-of-text; fewer if the corpus is too small."""

    own_ids: ClassVar[bool] = True  # of no published model

    def __init__(
        self, *, vocab_size: Annotated[int, ">= 257"], max_training_bytes: Annotated[int, ">= 1"] = 256 * 1024**2
    ) -> None:
        """Check the settings.

        Args:
            vocab_size: Number of ids; equal to that of the model, so that every embedding row is used.
            max_training_bytes: Maximum amount of text for learning merges, spread evenly over the corpus.

        Raises:
            ConfigError: `vocab_size` is too small for all byte values and end-of-text.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"tokenizer.vocab_size={vocab_size}",
                f"{NUM_BYTES} bytes and the end of a document take {SMALLEST_VOCABULARY} ids",
                f"model.vocab_size={SMALLEST_VOCABULARY} tokenizer=bytes, or a larger vocabulary",
            )
        self.vocab_size = vocab_size
        self.max_training_bytes = max_training_bytes

    def make(self, corpus: TextCorpus) -> Tokenizer:
        """Train on the corpus, or load the cached tokenizer of the same content."""
        recipe = f"{_FORMAT} {corpus.content_hash} {self.max_training_bytes} {_PATTERN}"
        key = hashlib.blake2b(recipe.encode(), digest_size=10).hexdigest()
        folder = corpus.cache_dir / "tokenizers" / f"bpe_{self.vocab_size}_{key}"

        def build(temporary: Path) -> None:
            train_bpe(corpus.texts(self.max_training_bytes), vocab_size=self.vocab_size).save(temporary)

        build_once(folder, build, is_complete=Tokenizer.is_complete)
        return Tokenizer.load(folder)


def train_bpe(texts: Iterator[str], *, vocab_size: int) -> Tokenizer:
    """Learn merges from texts; deterministic.

    Args:
        texts: Training texts.
        vocab_size: Maximum number of ids.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with _library_threads():
        backend.train_from_iterator(texts, trainer=trainer)
    end_of_text = backend.token_to_id(END_OF_TEXT)
    assert end_of_text is not None, "the trainer puts special tokens first"
    tokenizer = Tokenizer(backend, end_of_text=end_of_text)
    if tokenizer.vocab_size < vocab_size:
        log.warning(
            "the corpus has merges for %d tokens only, not %d; the other ids stay unused",
            tokenizer.vocab_size,
            vocab_size,
        )
    return tokenizer


@contextlib.contextmanager
def _library_threads() -> Iterator[None]:
    """Allow the library's threads within this context only, so that later forks are safe and silent."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.setdefault(name, "false")
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ[name] = before
