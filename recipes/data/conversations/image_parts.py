"""Images in conversations: how rows name them, where they stand in a text, and which tokens stand for them.

In the text of a message, `MARK` is the place of an image. Templates and the tokenizer see it in place of `<image>`, so
that nobody who types `<image>` makes a place of it. Its token is replaced by those of the image at the very end.

Shapes: N tokens of an example, P tokens of an image.
"""

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from recipes.data.found_files import describe_missing
from recipes.data.read_rows import Row, name_type
from recipes.errors import ConfigError
from recipes.home import expand_home

TYPED = "<image>"  # the place of an image, as people type it
MARK = "\ufdd0image\ufdd1"  # the same, with two characters that Unicode reserves for the inside of a program
PART_TYPES = ("image", "image_url", "input_image")
HELD_BY = ("image", "path", "url", "base64", "bytes", "image_url")  # fields of a part that hold its image
_LEADING, _TRAILING = re.compile(rf"({MARK}\n?)*"), re.compile(rf"(\n?{MARK})*\Z")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# how JPEG, PNG, GIF, WebP, TIFF and BMP begin
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"BM")
_MIN_ENCODED = 32  # characters: shorter texts are paths
_SHOWN_CHARACTERS = 60
_ANOTHER_IMAGE = "a path there, base64, or {bytes: …} as datasets keeps an image"

Image = str | bytes  # the path of a file as a row has it, or its content


def read_image(value: Any, place: str) -> Image:
    """Return an image as a row has it: a path, a URI of `data:` or `file:`, base64, or an object that holds one.

    Args:
        value: What the row has.
        place: File and line, for errors.

    Raises:
        ConfigError: It is an address, or nothing of these.
    """
    if isinstance(value, Mapping):
        if content := value.get("bytes") or value.get("base64"):
            return content if isinstance(content, bytes) else _decode_text(str(content))
        value = next((value[name] for name in HELD_BY if value.get(name)), None)
        if isinstance(value, Mapping):  # OpenAI: {"image_url": {"url": …}}
            return read_image(value, place)
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        shown = "empty" if value in ("", b"") else name_type(value)
        raise ConfigError(place, f"one of its images is {shown}", _ANOTHER_IMAGE)
    if value.startswith("data:"):
        header, _, encoded = value.partition(",")
        if not header.endswith(";base64"):
            reason = f"one of its images is {header[:_SHOWN_CHARACTERS]}, and not base64"
            raise ConfigError(place, reason, "data:image/png;base64,… there")
        return _decode_text(encoded)
    scheme = _SCHEME.match(value)
    if scheme is None:
        return _find_encoded(value) or value
    if scheme[1].lower() == "file":
        return unquote(urlsplit(value).path)
    reason = f"one of its images is the address {value[:_SHOWN_CHARACTERS]}, and nothing is downloaded while it trains"
    raise ConfigError(place, reason, "the images in a folder, with paths in the rows and data.image_folder=<folder>")


def _find_encoded(text: str) -> bytes | None:
    """Return the content of an image that is written as base64; None if a text is none."""
    try:
        found = base64.b64decode("".join(text.split()), validate=True) if len(text) >= _MIN_ENCODED else b""
    except (binascii.Error, ValueError):  # a path
        return None
    return found if found.startswith(_SIGNATURES) else None


def _decode_text(text: str) -> bytes:
    """Return the content of an image that is given as text: base64, or bytes that are UTF-8 by chance."""
    return _find_encoded(text) or text.encode("utf-8", "surrogateescape")


def join_parts(parts: Sequence[str]) -> str:
    """Return texts and marks as one text: images before and after all text stand in lines of their own."""
    parts = [part for part in parts if part]
    texts = [index for index, part in enumerate(parts) if part != MARK]
    first, end = (texts[0], texts[-1] + 1) if texts else (len(parts), len(parts))
    body = "".join(parts[first:end])
    return "\n".join([*parts[:first], *([body] if body else []), *parts[end:]])


def split_parts(text: str) -> list[dict[str, str]]:
    """Return the parts of a message, as templates of models with images read them: the inverse of `join_parts`."""
    leading = _match(_LEADING.match(text))
    trailing = _match(_TRAILING.search(text, len(leading)))
    pieces = text[len(leading) : len(text) - len(trailing)].split(MARK)
    found: list[dict[str, str]] = [{"type": "image"}] * leading.count(MARK)
    for index, piece in enumerate(pieces):
        found += [{"type": "image"}] * (index > 0)
        found += [{"type": "text", "text": piece}] if piece or text == "" else []
    return found + [{"type": "image"}] * trailing.count(MARK)


def _match(found: re.Match[str] | None) -> str:
    assert found is not None, "it matches nothing, too"
    return found[0]


def place_images(
    texts: Sequence[str], own: Sequence[Image | None], given: Sequence[Image], *, first: int, place: str
) -> tuple[list[str], tuple[Image, ...]]:
    """Return the texts of a conversation with a mark for each image, and the images in their order.

    Args:
        texts: What is asked: the messages of all but the assistant, in order.
        own: What is at each mark in them; None: the next one of `given`.
        given: Images of the row beside its messages.
        first: Index of the text before which images stand that have no place.
        place: File and line, for errors.

    Raises:
        ConfigError: There are more images than places for them, or fewer.
    """
    num_open = sum(image is None for image in own)
    # what is typed in a row without images is text
    num_places = num_open if own or not given else sum(text.count(TYPED) for text in texts)
    if len(given) != num_places and (num_places or own):
        named = "parts of type image without one" if num_open else f"times {TYPED} in what is asked"
        reason = f"it has {len(given)} images, and {num_places} {named}"
        raise ConfigError(place, reason, f"as many there as images, or no {TYPED}: then they stand before the question")
    if own or not given:
        rest = iter(given)
        return [*texts], tuple(next(rest) if image is None else image for image in own)
    if num_places:
        return [text.replace(TYPED, MARK) for text in texts], tuple(given)
    before = join_parts([*[MARK] * len(given), texts[first]])
    return [*texts[:first], before, *texts[first + 1 :]], tuple(given)


@dataclass(frozen=True)
class ImageTokens:
    """The tokens that stand for an image.

    Attributes:
        id: Of each of them.
        length: P.
    """

    id: int
    length: int

    def count(self, tokens: NDArray[Any]) -> int:
        """Return the number of whole images in tokens."""
        return int(np.count_nonzero(tokens == self.id)) // self.length

    def expand(self, tokens: NDArray[Any], *, mark: int) -> list[int]:
        """Return tokens with all of those of an image in place of each mark.

        Args:
            tokens: [N].
            mark: Token that stands for an image.
        """
        is_mark = tokens == mark
        found: list[int] = np.repeat(np.where(is_mark, self.id, tokens), np.where(is_mark, self.length, 1)).tolist()
        return found

    def spell(self, tokens: NDArray[Any], decode: Callable[[list[int]], str]) -> str:
        """Return tokens as text, with `<image>` for all of those of an image.

        Args:
            tokens: [N].
            decode: Returns the text of tokens without images.
        """
        found = list[str]()
        begin = 0
        for number, place in enumerate(np.flatnonzero(tokens == self.id).tolist()):
            if number % self.length == 0:
                found += [decode(tokens[begin:place].tolist()), TYPED]
            begin = place + 1
        return "".join([*found, decode(tokens[begin:].tolist())])

    def shorten(self, tokens: NDArray[Any]) -> int:
        """Return how many of these first tokens of an example remain, so that no image is cut in two."""
        places = np.flatnonzero(tokens == self.id)
        num_cut = len(places) % self.length
        return int(places[-num_cut]) if num_cut else len(tokens)


class FoundImage(NamedTuple):
    """An image that is there: its file, or its content and an empty path.

    Attributes:
        path: Absolute.
        content: Of an image that is no file.
        typed: The path as the row gives it, without `./` and the like.
    """

    path: str
    content: bytes
    typed: str = ""

    @property
    def name(self) -> str:
        """Equal wherever the rows lie with their images, so that moving a data set does not change its splits."""
        return self.typed or self.key

    @property
    def key(self) -> str:
        """Equal for the same file, or equal content."""
        return self.path or hashlib.blake2b(self.content, digest_size=16).hexdigest()


@dataclass(frozen=True)
class ImageFinder:
    """Finds the images that rows name; picklable.

    Attributes:
        folder: Folder that paths are relative to, as it is typed; None: that of the file of a row.
        check: Raises BadImageError if the header of a file, or of its content, shows that it cannot be decoded.
    """

    folder: str | None
    check: Callable[[str | bytes], None]

    def find(self, image: Image, row: Row) -> FoundImage:
        """Return an image of a row.

        Raises:
            ConfigError: There is no such file, or it is no image.
        """
        if isinstance(image, bytes):
            self._check(image, f"{row.place}: an image in it", "the row without it")
            return FoundImage("", image)
        if self.folder is not None:
            folder = expand_home(self.folder, "data.image_folder")
        else:
            folder = expand_home("." if row.path is None else str(row.path.parent), "data.path")
        file = (folder / os.path.expanduser(image)).absolute()
        if not os.path.isfile(file):
            shown = image[:_SHOWN_CHARACTERS].encode("utf-8", "backslashreplace").decode()
            relative = "the file of the rows" if self.folder is None else f"data.image_folder={self.folder}"
            reason = f"its image is {shown}: {describe_missing(file)}; paths are relative to {relative}"
            raise ConfigError(row.place, reason, "data.image_folder=<folder of the images>")
        self._check(str(file), f"{row.place}, {file}", "another copy of the image, or the rows without it")
        return FoundImage(str(file), b"", os.path.normpath(image))

    def _check(self, image: str | bytes, name: str, fix: str) -> None:
        try:
            self.check(image)
        except ValueError as error:  # BadImageError, whose module imports torch
            raise ConfigError(name, str(error), fix) from error
        except OSError as error:
            raise ConfigError(name, f"it cannot be read: {error.strerror}", fix) from error
