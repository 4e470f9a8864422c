"""Tokenizer class based on the `tokenizers` library: ~3 MB/s per process, or ~500 MB/s for bytes.

The library's threads are disabled because a process that has used them must not fork afterwards, and DataLoader
workers are forked. Instead, recipes/data/text/token_cache.py distributes texts over processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from recipes.errors import ConfigError, python
from recipes.files import write_atomically
from recipes.foreign_file import reading

log = logging.getLogger("lightning_recipes")

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
GENERATION_FILE = "generation_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
MODEL_FILE = "config.json"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# which end a text in published vocabularies
_USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|im_end|>", "<|end|>", "[SEP]")
_MAX_PROBED = 1000  # words
_ALL_BYTES = 1 << 60
_RARE_CHARACTER = "\U00010380"  # of Ugaritic
HUB_SNAPSHOTS = "snapshots"  # in the cache of the hub, the folder above that of a revision
READ_FIX = "tokenizer.name=<folder with tokenizer.json>, which works offline, or another hub id"
CODE_SETTINGS = ("auto_map", "custom_pipelines")  # name Python code in the folder, which is neither run nor copied


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
    """A vocabulary with its rules; special tokens spelled out in a text are encoded as plain text.

    Attributes:
        end_of_text: Id of the token that ends a document.
        first_tokens: Ids that the tokenizer puts before every text, such as `<s>`; usually none.
        vocab_size: One more than the largest id.
        fingerprint: Equal for equal ids.
    """

    def __init__(
        self,
        backend: Any,
        *,
        end_of_text: int,
        settings: dict[str, Any] | None = None,
        published_ids: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a backend.

        Args:
            backend: A `tokenizers.Tokenizer`; this object owns and modifies it.
            end_of_text: Id of the token that ends a document.
            settings: Content of `tokenizer_config.json` for transformers; None writes the minimum.
            published_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` as the config of the published model gives
                them; None: they follow from the tokenizer.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        _switch_off_dropout(backend)
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
            "model_input_names": ["input_ids", "attention_mask"],  # decoders take no token types
        }
        self._published_ids = dict(published_ids or {})
        self.first_tokens: list[int] = _added_by(backend)[0]
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
        try:
            if self.is_bytes:
                return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
        except Exception as error:
            if (mistake := _explain_text(text, error)) is None:
                raise
            raise mistake from error
        return np.array(encoding.ids, dtype=np.uint32)

    def encode_rendered(self, text: str) -> Any:
        """Return the `tokenizers.Encoding` of a rendered conversation, in which special tokens are recognized."""
        self._backend.encode_special_tokens = False
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except Exception as error:
            if (mistake := _explain_text(text, error)) is None:
                raise
            raise mistake from error
        finally:
            self._backend.encode_special_tokens = True

    def encode_start(self, text: str, *, reads_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text that starts a sequence: after `first_tokens`, unless it begins with them.

        Args:
            text: A document, or the prompt of a generation.
            reads_special_tokens: Whether special tokens spelled out in the text are recognized, as in transformers.
                Right for what a person types; in a data set they are text.
        """
        ids: list[int] = self.encode_rendered(text).ids if reads_special_tokens else self.encode(text)
        first = self.first_tokens
        return ids if ids[: len(first)] == first else [*first, *ids]

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by name, as used in chat templates: `bos_token`, `eos_token`, …"""
        named = {name: value for name, value in self._settings.items() if name.endswith("_token") and value}
        return {name: token_text(value) for name, value in named.items() if isinstance(value, str | dict)}

    @property
    def end_ids(self) -> list[int]:
        """Ids that end a text: those that the published model stops at, then end-of-text."""
        published = self._published_ids.get("eos_token_id") or []
        return list(dict.fromkeys([*(published if isinstance(published, list) else [published]), self.end_of_text]))

    def find_id(self, name: Literal["bos", "pad"]) -> int | None:
        """Return the id of the beginning-of-text or padding token, of the published model or else of the tokenizer."""
        published: int | None = self._published_ids.get(f"{name}_token_id")
        token = self.special_tokens.get(f"{name}_token")
        if published is not None or token is None:
            return published
        found: int | None = self._backend.token_to_id(token)
        return found

    @property
    def added_tokens(self) -> dict[str, dict[str, Any]]:
        """`added_tokens_decoder` of `tokenizer_config.json`: id -> text and flags of each token beside the model's."""
        flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        added = self._backend.get_added_tokens_decoder()
        return {str(id): {name: getattr(token, name) for name in flags} for id, token in sorted(added.items())}

    def spell(self, id: int) -> str:
        """Return the text of one vocabulary entry, such as `<|im_end|>`; empty for an id without one."""
        return self._backend.id_to_token(id) or ""

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
        return self.chat_templates.get("default")

    @property
    def chat_templates(self) -> dict[str, str]:
        """Jinja chat templates by name; a single one is the default."""
        found = self._settings.get("chat_template")
        if isinstance(found, list):
            return {entry["name"]: entry["template"] for entry in found}
        return {} if found is None else {"default": found}

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return a copy with a different chat template, which is saved with the trained model."""
        settings = self._settings | {"chat_template": template}
        return _from_json(self.to_json(), self.end_of_text, settings, self._published_ids)

    def knows(self, text: str) -> bool:
        """Return whether a text is an entry of the vocabulary."""
        return self._backend.token_to_id(text) is not None

    def with_special_token(self, text: str, *, id: int) -> Tokenizer:
        """Return a copy that recognizes a text as a special token of this id.

        Where the vocabulary ends before it, tokens that no text has fill the gap.
        """
        backend = Backend.from_str(self.to_json())
        unused = [f"<unused_{number}>" for number in range(self.vocab_size, id)]
        for token in [*unused, text]:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        assert backend.token_to_id(text) == id, f"{text} is {backend.token_to_id(text)}, not {id}"
        published = self._published_ids
        return Tokenizer(backend, end_of_text=self.end_of_text, settings=dict(self._settings), published_ids=published)

    def with_mark(self, mark: str, *, in_place_of: int) -> Tokenizer:
        """Return a copy with one more token, the last one, which stands wherever a text has a mark.

        Args:
            mark: Text that no other text has.
            in_place_of: Id of the added token for which the mark stands, if there is one: no text has that token
                any more, however it is spelled. All other texts keep their ids.
        """
        content = json.loads(self.to_json())
        hidden, settings, flags = f"{mark} {in_place_of}", dict(self._settings), dict[str, bool]()
        for token in content["added_tokens"]:
            if token["id"] != in_place_of:
                continue
            spelled, token["content"] = token["content"], hidden
            flags = {name: token[name] for name in ("lstrip", "rstrip")}
            settings |= {name: mark for name, text in self.special_tokens.items() if text == spelled}
            vocab = content["model"]["vocab"]  # many have added tokens there, too
            if isinstance(vocab, dict) and spelled in vocab:
                vocab[hidden] = vocab.pop(spelled)
            elif isinstance(vocab, list):
                content["model"]["vocab"] = [[hidden if text == spelled else text, score] for text, score in vocab]
        backend = Backend.from_str(json.dumps(content))
        # not special: plain text has it, too
        backend.add_tokens([AddedToken(mark, normalized=False, special=False, **flags)])
        published = self._published_ids
        return Tokenizer(backend, end_of_text=self.end_of_text, settings=settings, published_ids=published)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; end-of-text is spelled out, invalid UTF-8 becomes U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def decode_continuation(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Return the text that new tokens add to a prompt.

        Decoding them alone would differ: decoders in the style of SentencePiece drop the blank before the first token
        of a text, and a character may begin in the prompt and end in the new tokens.
        """
        before, whole = self.decode(prompt), self.decode([*prompt, *new])
        pairs = zip(before, whole, strict=False)
        num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return whole[num_same:]

    @property
    def splits_at_lines(self) -> bool:
        """Whether encoding a text line by line gives the same ids as encoding it at once.

        True for byte-level vocabularies, false for a tokenizer that puts a space before every text.
        """
        first, second = "one two;\n", "three (four)\n"
        try:
            return self.encode(first) + self.encode(second) == self.encode(first + second)
        except ConfigError:  # not in a small vocabulary
            return False

    def check_model(self, num_ids: int | None) -> None:
        """Check that a model has every id of the vocabulary.

        Args:
            num_ids: Vocabulary size of the model; None: any.

        Raises:
            ConfigError: The tokenizer has more.
        """
        if num_ids is None or self.vocab_size <= num_ids:
            return
        raise ConfigError(
            f"model.vocab_size={num_ids}",
            f"the tokenizer has {self.vocab_size} tokens",
            f"model.vocab_size={self.vocab_size} for a model of random weights; with model.pretrained, the tokenizer of"
            " those weights; with model=huggingface,"
            f" model.name=<the model after resize_token_embeddings({self.vocab_size}) of transformers>",
        )

    def shares_vocabulary(self, folder: Path) -> bool:
        """Return whether the tokenizer in a folder has the same ids; a folder without one has those it was made for.

        One that cannot be read, damaged or of a newer format, counts as another one.
        """
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            return bool(self._published_ids)
        try:
            with reading(file, str(file), READ_FIX):
                theirs = Backend.from_file(str(file))
        except ConfigError as error:
            log.warning("%s: the special ids and settings beside it are not used", error.reason)
            return False
        return bool(theirs.get_vocab(with_added_tokens=True) == self._backend.get_vocab(with_added_tokens=True))

    def count_dropped(self, corpus: TextCorpus, *, num_characters: int) -> tuple[Counter[str], int]:
        """Count the characters that are left out, because the vocabulary has neither them nor a token for such.

        Args:
            corpus: Texts, read from the first one on.
            num_characters: How many to look at.

        Returns:
            The number of each of them, and of all characters that were looked at. Blanks are not counted.
        """
        found: Counter[str] = Counter()
        if not _is_dropped(self._backend, _RARE_CHARACTER):
            return found, 0
        num_left = num_characters
        for text in corpus.texts(_ALL_BYTES):
            found.update(text[:num_left])
            num_left -= len(text)
            if num_left <= 0:
                break
        num_seen = found.total()
        dropped = {char: num for char, num in found.items() if not char.isspace() and _is_dropped(self._backend, char)}
        return Counter(dropped), num_seen

    def with_ids_of(self, folder: Path) -> Tokenizer:
        """Return a tokenizer that also knows the ids in the config of a model, if it has the same vocabulary."""
        ids = read_published_ids(folder)
        if not ids or not self.shares_vocabulary(folder):
            return self
        ends = [*(self._published_ids.get("eos_token_id") or []), *ids.get("eos_token_id", [])]
        ids |= self._published_ids | ({"eos_token_id": list(dict.fromkeys(ends))} if ends else {})
        return _from_json(self.to_json(), self.end_of_text, self._settings, ids)

    def save(self, folder: Path, *, settings: Mapping[str, Any] | None = None) -> None:
        """Write the files that `transformers.AutoTokenizer` loads, and the ids of a published model.

        Args:
            folder: Created if necessary.
            settings: Replace some in `tokenizer_config.json`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / TOKENIZER_FILE, self.to_json(), fsync=True)
        _write_json(folder / SETTINGS_FILE, {**self._settings, **(settings or {})})
        if self._published_ids:
            _write_json(folder / GENERATION_FILE, self._published_ids)
        template = self._settings.get("chat_template")
        if isinstance(template, str):  # where transformers looks first: a file of another template would win
            write_atomically(folder / TEMPLATE_FILE, template, fsync=True)
        else:
            (folder / TEMPLATE_FILE).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load a tokenizer that `save` wrote.

        Raises:
            ConfigError: A tokenizer file is missing or damaged.
        """
        fix = f"the {TOKENIZER_FILE} and {SETTINGS_FILE} that were written there, from a copy"
        if not (folder / SETTINGS_FILE).is_file():
            raise ConfigError(str(folder), f"its tokenizer is damaged: there is no {SETTINGS_FILE}", fix)
        return read_folder(folder, setting=str(folder), fix=fix)

    @classmethod
    def is_complete(cls, folder: Path) -> bool:
        """Return whether a folder contains a loadable tokenizer; takes about 10 ms."""
        if not (folder / TOKENIZER_FILE).is_file():
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
        return _from_json, (self.to_json(), self.end_of_text, self._settings, self._published_ids)


def read_folder(folder: Path, *, setting: str | None = None, fix: str = READ_FIX) -> Tokenizer:
    """Return the tokenizer of a published model.

    What transformers would read is read: `special_tokens_map.json` and `added_tokens.json` of older versions, chat
    templates in files of their own, and which ids begin, end and pad a text by `config.json` and
    `generation_config.json`.

    Args:
        folder: Folder with a `tokenizer.json`.
        setting: Override that named it, for errors; None: `tokenizer.name`.
        fix: What to type instead.

    Raises:
        ConfigError: A file is missing or invalid, or the vocabulary has no end-of-text token.
    """
    setting = setting or f"tokenizer.name={folder}"
    file = folder / TOKENIZER_FILE
    with reading(file, setting, fix):
        backend = Backend.from_file(str(file))
    settings = _read_json(folder / SETTINGS_FILE, setting, fix)
    for name in CODE_SETTINGS:
        settings.pop(name, None)
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        settings |= _read_json(folder / SPECIAL_TOKENS_FILE, setting, fix)
        special = _special_texts(settings)
        listed = {
            id: {"content": text, "special": text in special, "normalized": text not in special}
            for text, id in _read_json(folder / ADDED_TOKENS_FILE, setting, fix).items()
            if backend.token_to_id(text) is None
        }
    if (templates := _read_templates(folder, setting, fix)) is not None:
        settings["chat_template"] = templates
    published_ids = read_published_ids(folder, setting=setting, fix=fix)
    with reading(folder / SETTINGS_FILE, setting, fix):
        _check_settings(settings)
        _add_listed_tokens(backend, listed)
        end_of_text = _find_end_of_text(backend, settings, published_ids)
        if end_of_text is None:
            raise _explain_no_end(backend, folder, settings.get("eos_token"), setting, fix)
        settings["clean_up_tokenization_spaces"] = False  # it would drop blanks: decoding is the inverse of encoding
        settings.setdefault("model_input_names", ["input_ids", "attention_mask"])  # decoders take no token types
        _register_special_tokens(backend, settings)
        _settle_added_tokens(backend, settings)
        _warn_of_dropped_characters(backend, setting)
        return Tokenizer(backend, end_of_text=end_of_text, settings=settings, published_ids=published_ids)


def _explain_no_end(backend: Any, folder: Path, eos_token: Any, setting: str, fix: str) -> ConfigError:
    """Return the error for a vocabulary without the end-of-text token, with how to name or add one."""
    end = token_text(eos_token or END_OF_TEXT)
    reason = f"its vocabulary has no end-of-text token {end}"
    if fix != READ_FIX or HUB_SNAPSHOTS in folder.parts:  # written by a run, or in the cache of the hub
        return ConfigError(setting, reason, fix)
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    known = [token for token in (*_USUAL_ENDS, *special) if backend.token_to_id(token) is not None]
    if known:
        shown = "" if eos_token is None else f" in place of {end}"
        return ConfigError(setting, reason, f'"eos_token": "{known[0]}"{shown} in {folder / SETTINGS_FILE}, or {fix}')
    file = folder / TOKENIZER_FILE
    code = "t = Tokenizer.from_file(sys.argv[1]); t.add_special_tokens([sys.argv[2]]); t.save(sys.argv[1])"
    command = python(f"import sys; from tokenizers import Tokenizer; {code}", file, end)
    return ConfigError(setting, reason, f"{command} to add it, or {fix}")


def _check_settings(settings: dict[str, Any]) -> None:
    """Check what is used of `tokenizer_config.json`, and give chat templates with names one form."""
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        if value is not None and not _is_token(value):
            raise ValueError(f"{name} is {str(value)[:40]}, and not a text")
    for name, value in settings.items():
        if name.endswith("special_tokens") and isinstance(value, list) and not all(map(_is_token, value)):
            raise ValueError(f"{name} is not a list of texts")
    found = settings.get("chat_template")
    if isinstance(found, dict):
        found = settings["chat_template"] = [{"name": name, "template": text} for name, text in found.items()]
    entries = found if isinstance(found, list) else [{"name": "default", "template": found or ""}]
    fields = ("name", "template")
    if not all(isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in fields) for entry in entries):
        raise ValueError("chat_template is neither a text nor texts with names")


def _is_token(value: Any) -> bool:
    return isinstance(value["content"] if isinstance(value, dict) and "content" in value else value, str)


def _special_texts(settings: Mapping[str, Any]) -> set[str]:
    named = [settings.get(name) for name in _NAMED_TOKENS]
    lists = [value for name, value in settings.items() if name.endswith("special_tokens") and isinstance(value, list)]
    return {token_text(token) for token in [*named, *itertools.chain(*lists)] if token and _is_token(token)}


def _add_listed_tokens(backend: Any, listed: Mapping[Any, Mapping[str, Any]]) -> None:
    """Add the tokens that `tokenizer.json` lacks, and give the others the flags with which they are listed.

    As transformers does. It would also give a token another id than the listed one; that is an error here, because a
    model was trained with the listed one.
    """
    for id, token in sorted((int(id), token) for id, token in listed.items()):
        is_new = backend.token_to_id(token["content"]) is None
        backend.add_tokens([AddedToken(**token)])
        found = backend.token_to_id(token["content"])
        if is_new and found != id:
            raise ValueError(f"it lists {token['content']} with the id {id}, and {TOKENIZER_FILE} ends before {found}")


def _find_end_of_text(backend: Any, settings: dict[str, Any], published_ids: Mapping[str, Any]) -> int | None:
    """Return the id of the end-of-text token, and name it in the settings; None if the vocabulary has none."""
    given = settings.get("eos_token")
    eos_token = END_OF_TEXT if given is None else token_text(given)
    end_of_text: int | None = backend.token_to_id(eos_token)
    if end_of_text is None and given is None and "eos_token_id" in published_ids:
        end_of_text = int(published_ids["eos_token_id"][0])
        eos_token = backend.id_to_token(end_of_text) or eos_token
    if end_of_text is None or backend.id_to_token(end_of_text) is None:
        return None
    settings["eos_token"] = eos_token
    return end_of_text


def _read_json(path: Path, setting: str, fix: str) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no such file."""
    with reading(path, setting, fix):
        if not path.is_file():
            return {}
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError("it does not hold an object")
        return found


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", fsync=True)


def _read_templates(folder: Path, setting: str, fix: str) -> str | list[dict[str, str]] | None:
    """Return the chat template in a file of its own, or a list of several with their names; None if there is none."""
    files = {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files = {"default": folder / TEMPLATE_FILE} | files
    texts = []
    for name, path in files.items():
        with reading(path, setting, fix):
            texts.append({"name": name, "template": path.read_bytes().decode("utf-8")})
    if [text["name"] for text in texts] == ["default"]:
        return texts[0]["template"]
    return texts or None


def read_published_ids(folder: Path, *, setting: str | None = None, fix: str = READ_FIX) -> dict[str, Any]:
    """Return the ids that begin, end (a list) and pad a text by the config and the generation settings of a model.

    A model may have several ends, and often only one of the two files has all of them.
    """
    found: dict[str, Any] = {}
    setting = setting or f"tokenizer.name={folder}"
    for config in (_read_json(folder / file, setting, fix) for file in (GENERATION_FILE, MODEL_FILE)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = config.get(name)
            listed = value if isinstance(value, list) else [value]
            ids = [id for id in listed if isinstance(id, int) and not isinstance(id, bool) and id >= 0]
            if name == "eos_token_id" and ids:
                found[name] = list(dict.fromkeys([*found.get(name, []), *ids]))
            elif ids:
                found.setdefault(name, ids[0])
    return found


def _added_by(backend: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer adds before and after a text."""
    words = sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda word: word[1])
    for text in ("a", *(word for word, _ in words[:_MAX_PROBED])):  # a small vocabulary may not have the first
        with contextlib.suppress(Exception):  # of an unknown word
            encoding = backend.encode(text, add_special_tokens=True)
            is_added: list[int] = encoding.special_tokens_mask
            if 0 in is_added:
                last = is_added[::-1].index(0)
                return encoding.ids[: is_added.index(0)], encoding.ids[len(is_added) - last :]
    raise ValueError("it encodes none of the words of its vocabulary")


def _warn_of_dropped_characters(backend: Any, setting: str) -> None:
    if _is_dropped(backend, _RARE_CHARACTER):
        log.warning("%s: characters that its vocabulary does not have are left out of every text", setting)


def _is_dropped(backend: Any, character: str) -> bool:
    """Return whether a character leaves no trace in the ids, or only that of the blank before a text."""
    with contextlib.suppress(Exception):  # of an unknown character, which is no silent loss
        ids = backend.encode(character, add_special_tokens=False).ids
        return not backend.decode(ids, skip_special_tokens=False).strip("\u2581 ")
    return False


def _register_special_tokens(backend: Any, settings: dict[str, Any]) -> None:
    """Recognize every special token that the settings name, as transformers does; forget those without an id.

    transformers would give a name without an id the first one beyond the vocabulary, for which no model has a row.
    """

    def is_known(token: Any) -> bool:
        text = token_text(token)
        if backend.token_to_id(text) is None:
            log.info("%s of the tokenizer is not in its vocabulary, and is left out", text)
            return False
        if text not in known:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        return True

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for name, value in list(settings.items()):
        if name.endswith("_token") and isinstance(value, str | dict) and value and not is_known(value):
            del settings[name]
        elif name.endswith("special_tokens") and isinstance(value, list):
            settings[name] = [token for token in value if is_known(token)]


def _settle_added_tokens(backend: Any, settings: dict[str, Any]) -> None:
    """Make `tokenizer.json` alone decide what is added to a text: a beginning, and no end.

    transformers 4 also reads `add_bos_token` and `add_eos_token`, transformers 5 does not. An end after every prompt
    would leave a model nothing to continue.
    """
    first, last = _added_by(backend)
    bos_token = None if settings.get("bos_token") is None else token_text(settings["bos_token"])
    wants_bos = settings.get("add_bos_token")
    if wants_bos and not first and bos_token is not None and backend.token_to_id(bos_token) is not None:
        first = [backend.token_to_id(bos_token)]
        log.info("The tokenizer puts %s before every text: add_bos_token in %s", bos_token, SETTINGS_FILE)
    elif wants_bos is False and first:
        shown = "".join(map(backend.id_to_token, first))
        log.info("The tokenizer puts %s before every text, by %s; add_bos_token=false is void", shown, TOKENIZER_FILE)
    if last:
        log.info("%s, which the tokenizer puts after every text, is left out", "".join(map(backend.id_to_token, last)))
    if last or first != _added_by(backend)[0]:
        tokens = [(backend.id_to_token(id), id) for id in first]
        before = [text for text, _ in tokens]
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0"],
            pair=[*before, "$A:0", *(f"{text}:1" for text in before), "$B:1"],
            special_tokens=tokens,
        )
    settings |= {
        name: value for name, value in (("add_bos_token", bool(first)), ("add_eos_token", False)) if name in settings
    }


def token_text(token: str | dict[str, Any]) -> str:
    """Return the text of a token in `tokenizer_config.json`, given as a string or an object."""
    return token if isinstance(token, str) else str(token["content"])


def _explain_text(text: str, error: Exception) -> ConfigError | None:
    """Return the error for a text that the library does not encode; None if it is not due to the text."""
    if "unk" in str(error).lower():  # of any model: the library raises a plain Exception, in a sentence of its own
        reason = f"a text has a word or character that is not in its vocabulary, nor a token for such: {error}"
        fix = f"tokenizer=bpe, which learns the text, or {READ_FIX}"
        return ConfigError("tokenizer=huggingface", reason, fix)
    if not isinstance(error, TypeError | UnicodeEncodeError):
        return None
    half = next((ascii(character)[1:-1] for character in text if "\ud800" <= character <= "\udfff"), "another type")
    reason = f"it has {half}, half of a surrogate pair, which is no character"
    return ConfigError("text", reason, "the text without it, or with U+FFFD in its place")


def _from_json(serialized: str, end_of_text: int, settings: dict[str, Any], published_ids: dict[str, Any]) -> Tokenizer:
    backend = Backend.from_str(serialized)
    return Tokenizer(backend, end_of_text=end_of_text, settings=settings, published_ids=published_ids)


def _switch_off_dropout(backend: Any) -> None:
    """Make encoding deterministic: BPE may skip merges at random, the only random setting in a `tokenizer.json`."""
    dropout = getattr(backend.model, "dropout", None)
    if dropout:
        log.info(
            "The tokenizer skips merges at random (dropout %s): switched off, so that a text has one encoding", dropout
        )
        backend.model.dropout = None


def _is_bytes(backend: Any) -> bool:
    """Return whether every token id is its byte value and there are no merges or other text tokens."""
    expected = byte_alphabet() | {END_OF_TEXT: NUM_BYTES}
    is_plain = backend.normalizer is None
    return is_plain and backend.get_vocab(with_added_tokens=True) == expected
