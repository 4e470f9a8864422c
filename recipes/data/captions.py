"""Captions of images: the cells they are read from, and the tokens that a model reads of each.

Shapes: T tokens of a caption.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from recipes.data.read_rows import name_type
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer

_MAX_CHARACTERS = 1 << 16  # of a caption: longer ones would be tokenized at every reading, and nearly all of them cut
_NUM_SHOWN = 8  # fields of a row that an error names
_BYTE_ORDER_MARK = "\ufeff"
_HASH_BITS = 63  # of an int64 that is not negative


@dataclass(frozen=True, kw_only=True)
class CaptionColumns:
    """Columns of captions, one or several of an image: each cell is a text, or a list of texts.

    Attributes:
        names: Of the columns.
    """

    kind: ClassVar[str] = "captions"
    setting: ClassVar[str] = "data.caption"

    names: Sequence[str]

    @classmethod
    def of(cls, caption: str | Sequence[str]) -> "CaptionColumns":
        """Return the columns that `data.caption` names."""
        return cls(names=[caption] if isinstance(caption, str) else [*caption])

    def pick(self, fields: dict[str, Any], place: str) -> list[Any]:
        """Return the cells of a row.

        Raises:
            ConfigError: A column is missing, holds something else, or the row has no caption.
        """
        for name in self.names:
            if name not in fields:
                known = ", ".join([*map(str, fields)][:_NUM_SHOWN]) or "nothing"
                raise ConfigError(f"{self.setting}={name}", f"{place} has {known}", f"{self.setting}=<one of them>")
            self._check(fields[name], name, place)
        cells = [fields[name] for name in self.names]
        if not list_captions(cells)[0]:
            reason = f"its {' and its '.join(self.names)} {'is' if len(cells) == 1 else 'are'} empty"
            raise ConfigError(
                place, reason, f"the rows without those that have no caption, or {self.setting}=<another>"
            )
        return cells

    def _check(self, cell: Any, name: str, place: str) -> None:
        """Check that a cell is a text, a list of texts, or empty.

        Raises:
            ConfigError: It is something else, or longer than a caption is.
        """
        is_list = isinstance(cell, list | tuple)
        for part in cell if is_list else [cell]:
            if part is None or part != part:  # NaN: an empty cell of a column of text
                continue
            if not isinstance(part, str):
                shown = json.dumps(cell, default=str, ensure_ascii=False)[:60]
                reason = f"its {name} has {name_type(part)} in {shown}" if is_list else f"its {name} is {shown}"
                fix = f"{self.setting}=<a column of texts, or of lists of texts>"
                raise ConfigError(place, f"{reason}, and a caption is text", fix)
            if len(part) > _MAX_CHARACTERS:
                reason = f"its {name} has {len(part):,} characters, and more than {_MAX_CHARACTERS:,} are no caption"
                raise ConfigError(place, reason, f"{self.setting}=<another column>, or the rows without it")


def list_captions(cells: Sequence[Any]) -> tuple[list[str], int]:
    """Return the captions in the cells of a row, each once, and the number of empty ones, which are left out."""
    parts = [part for cell in cells for part in (cell if isinstance(cell, list | tuple) else [cell])]
    texts = [part.strip().removeprefix(_BYTE_ORDER_MARK).strip() if isinstance(part, str) else "" for part in parts]
    captions = [*dict.fromkeys(filter(None, texts))]
    return captions, texts.count("")


def hash_caption(caption: str) -> int:
    """Return 63 bits that are equal for equal captions."""
    digest = hashlib.blake2b(caption.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _HASH_BITS)


class CaptionTokens:
    """Makes T tokens of a caption, as `transformers` does with `padding="max_length", truncation=True`.

    What the tokenizer puts before a text, the caption, and the token that ends a text, which is kept if the caption is
    cut. The padding is the tokenizer's, or the token that ends a text.

    Args:
        tokenizer: The tokenizer.
        seq_len: T.

    Raises:
        ConfigError: T leaves no room for a token of a caption.
    """

    def __init__(self, tokenizer: Tokenizer, *, seq_len: int) -> None:
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        pad = tokenizer.find_id("pad")
        self._padding = tokenizer.end_of_text if pad is None else pad
        self.room = seq_len - len(tokenizer.first_tokens) - 1
        if self.room < 1:
            least = len(tokenizer.first_tokens) + 2
            reason = f"the tokenizer's own tokens take {least - 1}, which leaves none for a caption"
            raise ConfigError(f"data.seq_len={seq_len}", reason, f"seq_len={least} or more")

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal tokens."""
        return f"{self.tokenizer.fingerprint}/{self.seq_len}/{self._padding}"

    def encode(self, caption: str) -> tuple[Tensor, Tensor]:
        """Return the tokens of a caption, [T] int64, and whether each is one, not padding, [T] bool."""
        ids = [*self.tokenizer.first_tokens, *self.tokenizer.encode(caption)[: self.room], self.tokenizer.end_of_text]
        tokens = torch.full((self.seq_len,), self._padding)  # [T]
        tokens[: len(ids)] = torch.tensor(ids)
        return tokens, torch.arange(self.seq_len) < len(ids)

    def count(self, caption: str) -> int:
        """Return the number of tokens of a caption as a whole, without those that the tokenizer adds."""
        return len(self.tokenizer.encode(caption))
