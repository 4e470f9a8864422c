"""On-disk store of tokenized examples: concatenated tokens with per-token marks, their origin, and their images.

An image in a file stays there, and its path is kept; one that is in the rows themselves is kept with its bytes.

Shapes: N examples, I images of all of them.
"""

import functools
import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from recipes.cache import build_once
from recipes.data.conversations.conversation import Example
from recipes.data.conversations.image_parts import FoundImage, ImageFinder
from recipes.data.conversations.loss_mask import Tokenized
from recipes.data.parallel import group_by_bytes, map_in_order
from recipes.data.read_rows import Row
from recipes.data.text.token_corpus import hash_text
from recipes.errors import ConfigError, type_setting
from recipes.files import count

log = logging.getLogger("lightning_recipes")
Encoder = Callable[[Example], Tokenized]  # picklable

FORMAT_VERSION = 8  # increase when the same key produces different files
_TASK_BYTES = 1024 * 1024
_TASK_ROWS = 4096
_ROWS_PER_PROCESS = 2000  # with fewer per process, starting it (~2 s with a chat template) does not pay off
_CARRIES_LOSS, _IS_ANSWER = 1, 2  # bits of a mark
_ARRAYS = ("starts", "questions", "targets", "values", "note_starts", "image_starts", "image_records")
_TYPES = {"marks": "uint8", "notes": "uint8", "images": "uint8"}  # of the other files; that of tokens is in `meta.json`
_MAX_NAMES = 100  # of fields; a row may have others than every other row


class AnyReader(Protocol):
    """Turns rows into examples; picklable."""

    def read_all(self, row: Mapping[str, Any], *, place: str, from_table: bool) -> Sequence[Example]:
        """Return the examples of a row, all of which are kept or none; arguments as for `Reader.read`."""

    def has_fields(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the fields that are read."""

    def suggest_fields(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the mapping, as it is typed, with which the rows can be read; None if there is none."""


class Encoded(NamedTuple):
    """One example of a row, tokenized.

    Attributes:
        place: Where it is.
        question: Hash of its question.
        is_conversation: Whether it is no plain text.
        silenced_by: Names of the weights that keep answers from being learned.
        unread: Fields that were not read.
        absent: Fields that were not there.
        tokenized: Its tokens.
        value: What the row says about this example, such as whether it is good; NaN: nothing.
        left_out: Why the row is not trained on; empty: it is.
        note: What is kept beside it.
        images: In the order of its tokens.
    """

    place: str
    question: int
    is_conversation: bool
    silenced_by: tuple[str, ...]
    unread: tuple[str, ...]
    absent: tuple[str, ...]
    tokenized: Tokenized
    value: float
    left_out: str
    note: str
    images: tuple[FoundImage, ...]


@dataclass(frozen=True)
class StoreMeta:
    """The content of `meta.json`.

    Attributes:
        num_conversations: Number of conversations; the other examples are plain text.
        num_ending: Number of examples in which an answer ends with a token that stops a generation, with a loss.
        num_in_parts: Number of rows of which an answer is learned in several parts, such as turns.
        num_note_bytes: Bytes of all notes.
        num_image_bytes: Bytes of the images that are kept, and of the paths of the others.
        unread: Fields that were not read, with the number of rows that have them.
        hidden: What the template does not show, with the number of rows.
        absent: Names in `data.fields` that no conversation has.
        dropped: Locations of rows in which no token has a loss, or of which an example has none.
        left_out: Why other rows are not trained on, with their locations.
    """

    format_version: int
    dtype: str
    num_examples: int
    num_tokens: int
    num_conversations: int
    num_ending: int
    num_in_parts: int
    num_note_bytes: int
    num_image_bytes: int
    unread: dict[str, int]
    hidden: dict[str, int]
    absent: list[str]
    dropped: list[str]
    left_out: dict[str, list[str]] = field(default_factory=dict)


class ExampleStore:
    """A complete folder of examples, memory-mapped; picklable.

    Args:
        folder: Written by `cached_examples`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        fields = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.meta = StoreMeta(**fields)
        self._maps: dict[str, NDArray[Any]] = {}

    def __len__(self) -> int:
        return self.meta.num_examples

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each example, [N]."""
        lengths: NDArray[np.int64] = np.diff(self._map("starts"))
        return lengths

    def length(self, example: int) -> int:
        """Return the number of tokens of one example, without reading the others."""
        first, last = self._map("starts")[example : example + 2]
        return int(last - first)

    @property
    def questions(self) -> NDArray[np.uint64]:
        """Hash of the question of each example, [N]."""
        return self._map("questions")

    @property
    def num_targets(self) -> NDArray[np.int64]:
        """Number of tokens with a loss of each example, [N]; the first token of an example is never a target."""
        return self._map("targets")

    @property
    def values(self) -> NDArray[np.float64]:
        """What the rows say about their examples, [N]; NaN: nothing."""
        return self._map("values")

    def tokens(self, example: int, *, stop: int | None = None) -> NDArray[np.int64]:
        """Return the first `stop` tokens of an example."""
        return self._slice("tokens", example, stop).astype(np.int64)

    def carries_loss(self, example: int, *, stop: int | None = None) -> NDArray[np.bool_]:
        """Return the loss mask of the first `stop` tokens of an example."""
        return (self._slice("marks", example, stop) & _CARRIES_LOSS).astype(np.bool_)

    def is_answer(self, example: int) -> NDArray[np.bool_]:
        """Return the mask of answer tokens of an example."""
        return (self._slice("marks", example, None) & _IS_ANSWER).astype(np.bool_)

    def place(self, example: int) -> str:
        """Return file and line of an example."""
        with (self.folder / "places.txt").open(encoding="utf-8", errors="surrogateescape") as lines:
            return next(islice(lines, example, None)).rstrip("\n")

    def note(self, example: int) -> str:
        """Return what is kept beside an example."""
        first, last = self._map("note_starts")[example : example + 2]
        return self._map("notes")[first:last].tobytes().decode() if last > first else ""

    @property
    def num_images(self) -> NDArray[np.int64]:
        """Number of images of each example, [N]."""
        num_images: NDArray[np.int64] = np.diff(self._map("image_starts"))
        return num_images

    def images(self, example: int, number: int) -> list[FoundImage]:
        """Return the first images of an example."""
        first, last = self._map("image_starts")[example : example + 2]
        records = self._map("image_records")[first : min(last, first + number)].tolist()
        return [self._image(begin, end, is_file=bool(is_file)) for begin, end, is_file in records]

    def _image(self, begin: int, end: int, *, is_file: bool) -> FoundImage:
        content = self._map("images")[begin:end].tobytes()
        return FoundImage(content.decode("utf-8", "surrogateescape"), b"") if is_file else FoundImage("", content)

    def _slice(self, name: str, example: int, stop: int | None) -> NDArray[Any]:
        first, last = self._map("starts")[example : example + 2]
        return self._map(name)[first : last if stop is None else min(last, first + stop)]

    def _map(self, name: str) -> NDArray[Any]:
        if name not in self._maps:
            if name in _ARRAYS:
                self._maps[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
            else:
                dtype = np.dtype(_TYPES.get(name, self.meta.dtype)).newbyteorder("<")
                self._maps[name] = np.memmap(self.folder / f"{name}.bin", dtype=dtype, mode="r")
        return self._maps[name]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without memory maps, which pickle would turn into copies of the files."""
        return {**self.__dict__, "_maps": {}}


def cached_examples(
    rows: Iterable[Row],
    *,
    setting: str,
    reader: AnyReader,
    tokenizer: Encoder,
    vocab_size: int,
    key: str,
    cache_dir: Path,
    num_processes: int,
    finder: ImageFinder | None = None,
    image_folder: str = "",
) -> ExampleStore:
    """Return the examples of rows, tokenizing them if they are not cached; safe in any number of processes.

    Args:
        rows: Rows to read.
        setting: Override that named them, for errors.
        reader: Converts rows to examples.
        tokenizer: Tokenizes examples.
        vocab_size: Vocabulary size of the tokenizer.
        key: Equal for equal examples.
        cache_dir: Folder of all caches.
        num_processes: Processes that tokenize.
        finder: Finds the images of rows; None: they have none.
        image_folder: Absolute path that paths of images are relative to, which are kept as absolute ones.

    Raises:
        ConfigError: A row or an image cannot be read, or no row has a loss; nothing is left in the cache.
    """
    folder = cache_dir / "examples" / name_examples("\0".join(filter(None, (key, image_folder))))

    def build(temporary: Path) -> None:
        encoded = _encode_all(rows, reader, tokenizer, finder, num_processes=num_processes)
        _write(temporary, encoded, vocab_size=vocab_size, setting=setting)

    build_once(folder, build, is_complete=is_complete)
    return ExampleStore(folder)


def name_examples(key: str) -> str:
    """Return the name of examples, equal for equal keys."""
    return hashlib.blake2b(f"{FORMAT_VERSION} {key}".encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def is_complete(folder: Path) -> bool:
    """Return whether a folder has its files, with the sizes given by `meta.json`."""
    try:
        meta = ExampleStore(folder).meta
        sizes = {name: (folder / f"{name}.bin").stat().st_size for name in ("tokens", "marks", "notes", "images")}
        has_arrays = all((folder / f"{name}.npy").is_file() for name in _ARRAYS)
    except (OSError, TypeError, ValueError):  # a file is missing, not JSON, or has other fields
        return False
    wanted = {"tokens": meta.num_tokens * np.dtype(meta.dtype).itemsize, "marks": meta.num_tokens}
    wanted |= {"notes": meta.num_note_bytes, "images": meta.num_image_bytes}
    return has_arrays and sizes == wanted and (folder / "places.txt").is_file()


def _encode_all(
    rows: Iterable[Row], reader: AnyReader, tokenizer: Encoder, finder: ImageFinder | None, *, num_processes: int
) -> Iterator[list[Encoded]]:
    """Yield the examples of each row."""
    tasks = group_by_bytes(rows, max_bytes=_TASK_BYTES, max_items=_TASK_ROWS)
    first = list(islice(tasks, 2))
    workers = 1 if len(first) < 2 and sum(map(len, first)) < _ROWS_PER_PROCESS else num_processes
    encode = functools.partial(_encode, reader=reader, tokenizer=tokenizer, finder=finder)
    for _, encoded in map_in_order(encode, chain(first, tasks), workers=workers):
        yield from encoded


def _encode(
    rows: Sequence[Row], *, reader: AnyReader, tokenizer: Encoder, finder: ImageFinder | None
) -> list[list[Encoded]]:
    return [
        [
            _encode_example(example, row, tokenizer, finder)
            for example in reader.read_all(row.parse(), place=row.place, from_table=row.from_table)
        ]
        for row in rows
    ]


def _encode_example(example: Example, row: Row, tokenizer: Encoder, finder: ImageFinder | None) -> Encoded:
    images = () if finder is None else tuple(finder.find(image, row) for image in example.images)
    return Encoded(
        row.place,
        # questions about one image, or the same one about many, tell what an unseen image is
        hash_text(images[0].name if images else example.question),
        not isinstance(example.answer, str),
        tuple(dict.fromkeys(example.silenced_by)),
        example.unread,
        example.absent,
        tokenizer(example),
        example.value,
        example.left_out,
        example.note,
        images,
    )


def _no_examples(
    setting: str, *, num_rows: int, silenced: Counter[str], left_out: Mapping[str, Sequence[str]]
) -> ConfigError:
    """Return the error for rows of which none has a loss."""
    key = setting.partition("=")[0]
    if left_out:
        shown = "; ".join(f"{count(len(places), 'row')}: {why}" for why, places in left_out.items())
        return ConfigError(setting, f"it has no row to learn from ({shown})", f"{key}=<other rows>")
    if not num_rows:
        return ConfigError(setting, "it has no rows", f"{key}=<rows with answers>")
    counted = "its only row has no" if num_rows == 1 else f"none of its {num_rows:,} rows has an"
    reason, fix = f"{counted} answer to learn", f"{key}=<rows with answers>, or data.fields={{…}} for other names"
    if silenced:
        names = ", ".join(sorted(silenced))
        reason += f", as the {f'field {names} says' if len(silenced) == 1 else f'fields {names} say'}"
        ignored = type_setting("data.fields", dict.fromkeys(sorted(silenced)))
        fix = f"{ignored}, which learns them, or {key}=<other rows>"
    return ConfigError(setting, reason, fix)


def _write(folder: Path, encoded: Iterator[list[Encoded]], *, vocab_size: int, setting: str) -> None:
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    starts, questions, targets, values = array("q", [0]), array("Q"), array("q"), array("d")
    note_starts, image_starts = array("q", [0]), array("q", [0])
    image_records, kept = array("q"), dict[str, tuple[int, int]]()  # begin and end of each image by its key
    dropped, left_out = list[str](), dict[str, list[str]]()
    unread, hidden, absent = Counter[str](), Counter[str](), Counter[str]()
    num_conversations = num_ending = num_in_parts = 0
    silenced = Counter[str]()
    files = [
        (folder / name).open("wb") for name in ("tokens.bin", "marks.bin", "notes.bin", "images.bin", "places.txt")
    ]
    tokens_file, marks_file, notes_file, images_file, places_file = files
    try:
        for examples in encoded:
            unread.update({name for example in examples for name in example.unread})
            if reason := next((example.left_out for example in examples if example.left_out), ""):
                left_out.setdefault(reason, []).append(examples[0].place)
                continue
            # the first token cannot be a target
            num_targets = [int(example.tokenized.carries_loss[1:].sum()) for example in examples]
            if not all(num_targets):
                dropped.append(examples[0].place)
                silenced.update({name for example in examples for name in example.silenced_by})
                continue
            for example in examples:
                tokenized = example.tokenized
                tokens_file.write(tokenized.tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
                marks = tokenized.carries_loss * np.uint8(_CARRIES_LOSS) + tokenized.is_answer * np.uint8(_IS_ANSWER)
                marks_file.write(marks.tobytes())
                note_starts.append(note_starts[-1] + notes_file.write(example.note.encode()))
                for image in example.images:
                    if image.key not in kept:
                        begin = images_file.tell()
                        content = image.content or image.path.encode("utf-8", "surrogateescape")
                        kept[image.key] = begin, begin + images_file.write(content)
                    image_records.extend((*kept[image.key], bool(image.path)))
                image_starts.append(image_starts[-1] + len(example.images))
                places_file.write(f"{example.place}\n".encode("utf-8", "surrogateescape"))
                starts.append(starts[-1] + len(tokenized.tokens))
                questions.append(example.question)
                values.append(example.value)
                absent.update(example.absent)
                num_conversations += example.is_conversation
                num_ending += tokenized.ends
            targets.extend(num_targets)
            num_in_parts += any(_count_parts(example.tokenized.carries_loss) > 1 for example in examples)
            hidden.update({name for example in examples for name in example.tokenized.hidden})
    finally:
        for file in files:
            file.close()
    if not questions:
        raise _no_examples(setting, num_rows=len(dropped), silenced=silenced, left_out=left_out)
    np.save(folder / "starts.npy", np.array(starts, dtype=np.int64))
    np.save(folder / "questions.npy", np.array(questions, dtype=np.uint64))
    np.save(folder / "targets.npy", np.array(targets, dtype=np.int64))
    np.save(folder / "values.npy", np.array(values, dtype=np.float64))
    np.save(folder / "note_starts.npy", np.array(note_starts, dtype=np.int64))
    np.save(folder / "image_starts.npy", np.array(image_starts, dtype=np.int64))
    np.save(folder / "image_records.npy", np.array(image_records, dtype=np.int64).reshape(-1, 3))  # [I, 3]
    meta = StoreMeta(
        format_version=FORMAT_VERSION,
        dtype=dtype,
        num_examples=len(questions),
        num_tokens=starts[-1],
        num_conversations=num_conversations,
        num_ending=num_ending,
        num_in_parts=num_in_parts,
        num_note_bytes=note_starts[-1],
        num_image_bytes=max((end for _, end in kept.values()), default=0),
        unread=dict(unread.most_common(_MAX_NAMES)),
        hidden=dict(hidden.most_common(_MAX_NAMES)),
        absent=[name for name, count in absent.items() if count == num_conversations],
        dropped=dropped,
        left_out=left_out,
    )
    (folder / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")


def _count_parts(carries_loss: NDArray[np.bool_]) -> int:
    """Return how many runs of tokens with a loss there are."""
    return int(np.count_nonzero(np.diff(carries_loss.astype(np.int8), prepend=0) == 1))
