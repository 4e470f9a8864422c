"""Tokenizer class based on the `tokenizers` library: ~3 MB/s per process, or ~500 MB/s for bytes.

The library's threads are disabled because a process that has used them must not fork afterwards, and DataLoader
workers are forked. Instead, recipes/data/text/tokenize.py distributes texts over processes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from recipes.errors import ConfigError
from recipes.files import write_atomically

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256

_TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILE = "tokenizer_config.json"


class TextCorpus(Protocol):
    """A text corpus to train a tokenizer on."""

    @property
    def cache_dir(self) -> Path: ...
    @property
    def content_hash(self) -> str: ...
    def texts(self, max_bytes: int) -> Iterator[str]: ...


class TokenizerConfig(Protocol):
    """One option of conf/tokenizer."""

    def make(self, corpus: TextCorpus) -> Tokenizer: ...


def byte_alphabet() -> dict[str, int]:
    """Map the printable character for each byte in a byte-level vocabulary to that byte.

    Printable Latin-1 bytes map to themselves, the others to the characters from 256 on, in order (GPT-2's
    byte-to-unicode table, called ByteLevel in `tokenizers`).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(NUM_BYTES)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(NUM_BYTES + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """A vocabulary with its rules; special tokens spelled out in a text are encoded as plain text."""

    def __init__(self, backend: Any, *, end_of_text: int, settings: dict[str, Any] | None = None) -> None:
        """Wrap a backend.

        Args:
            backend: A `tokenizers.Tokenizer`; this object owns and modifies it.
            end_of_text: Id of the token that ends a document.
            settings: Content of `tokenizer_config.json` for transformers; None writes the minimum.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        backend.no_truncation()
        backend.no_padding()
        self.end_of_text: int = end_of_text
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        serialized = backend.to_str()
        digest = hashlib.blake2b(f"{end_of_text}\n{serialized}".encode(), digest_size=16)
        self.fingerprint: str = digest.hexdigest()
        self._settings = settings or {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": backend.id_to_token(end_of_text),
            "clean_up_tokenization_spaces": False,
        }
        backend.encode_special_tokens = True
        self._backend = backend
        self.is_bytes = _is_bytes(backend)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens before or after it."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of several texts."""
        return [self.encode(text) for text in texts]

    def encode_array(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the token ids of a text as an array, [number of tokens]; with `is_bytes` this takes a single copy."""
        if self.is_bytes:
            return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, dtype=np.uint32)

    def encode_rendered(self, text: str) -> Any:
        """Return the `tokenizers.Encoding` of a rendered conversation, in which special tokens are recognized."""
        self._backend.encode_special_tokens = False
        try:
            return self._backend.encode(text, add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = True

    @property
    def first_tokens(self) -> list[int]:
        """Ids that a published tokenizer puts before every text, such as `<s>`; usually none."""
        with_special, plain = (self._backend.encode("a", add_special_tokens=adds).ids for adds in (True, False))
        start = next((i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain), 0)
        ids: list[int] = with_special[:start]
        return ids

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by name, as used in chat templates: `bos_token`, `eos_token`, …"""
        named = {name: value for name, value in self._settings.items() if name.endswith("_token") and value}
        return {name: token_text(value) for name, value in named.items() if isinstance(value, str | dict)}

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, such as end-of-turn; encoding plain text never produces them."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    def find_end(self, answer: Sequence[int]) -> int | None:
        """Return the token that ends an answer: its last special token, which a template may follow with a newline.

        None if there is no special token: tokens alone do not show where the turn ends.
        """
        special = self.special_ids | {self.end_of_text}
        return next((token for token in reversed(answer) if token in special), None)

    @property
    def chat_template(self) -> str | None:
        """Jinja chat template of a published tokenizer; the default if there are several."""
        found = self._settings.get("chat_template")
        if isinstance(found, list):
            by_name = {entry["name"]: entry["template"] for entry in found}
            found = by_name.get("default")
        return found

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return a copy with a different chat template, which is saved with the trained model."""
        return _from_json(self.to_json(), self.end_of_text, self._settings | {"chat_template": template})

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; end-of-text is spelled out, invalid UTF-8 becomes U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    @property
    def splits_at_lines(self) -> bool:
        """Whether encoding a text line by line gives the same ids as encoding it at once.

        True for byte-level vocabularies, false for a tokenizer that puts a space before every text.
        """
        first, second = "one two;\n", "three (four)\n"
        return self.encode(first) + self.encode(second) == self.encode(first + second)

    def save(self, folder: Path) -> None:
        """Write the two files that `transformers.AutoTokenizer` loads."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _TOKENIZER_FILE, self.to_json(), fsync=True)
        settings = json.dumps(self._settings, indent=2, ensure_ascii=False)
        write_atomically(folder / _SETTINGS_FILE, settings + "\n", fsync=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load a tokenizer that `save` wrote.

        Raises:
            ConfigError: A tokenizer file is missing or damaged.
        """
        try:
            settings = json.loads((folder / _SETTINGS_FILE).read_text(encoding="utf-8"))
            backend = Backend.from_file(str(folder / _TOKENIZER_FILE))
            end_of_text = backend.token_to_id(token_text(settings["eos_token"]))
        except Exception as error:  # `tokenizers` raises no narrower class
            raise _damaged(folder, str(error)) from error
        if end_of_text is None:
            raise _damaged(folder, f"its vocabulary has no {settings['eos_token']}")
        return cls(backend, end_of_text=end_of_text, settings=settings)

    @classmethod
    def is_complete(cls, folder: Path) -> bool:
        """Return whether a folder contains a loadable tokenizer; takes about 10 ms."""
        if not (folder / _TOKENIZER_FILE).is_file():
            return False
        try:
            cls.load(folder)
        except ConfigError:
            return False
        return True

    def to_json(self) -> str:
        """Return the content of `tokenizer.json`."""
        text: str = self._backend.to_str(pretty=False)
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as JSON."""
        return _from_json, (self.to_json(), self.end_of_text, self._settings)


def _damaged(folder: Path, reason: str) -> ConfigError:
    fix = f"the {_TOKENIZER_FILE} and {_SETTINGS_FILE} that were written there, from a copy"
    return ConfigError(str(folder), f"its tokenizer is damaged: {reason}", fix)


def token_text(token: str | dict[str, Any]) -> str:
    """Return the text of a token in `tokenizer_config.json`, given as a string or an object."""
    return token if isinstance(token, str) else str(token["content"])


def _from_json(serialized: str, end_of_text: int, settings: dict[str, Any]) -> Tokenizer:
    return Tokenizer(Backend.from_str(serialized), end_of_text=end_of_text, settings=settings)


def _is_bytes(backend: Any) -> bool:
    """Return whether every token id is its byte value and there are no merges or other text tokens."""
    expected = byte_alphabet() | {END_OF_TEXT: NUM_BYTES}
    is_plain = backend.normalizer is None
    return is_plain and backend.get_vocab(with_added_tokens=True) == expected
