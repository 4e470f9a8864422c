"""Words of a text and hashes of their n-grams, identical on every machine and in every process.

Shapes: W words, n words per n-gram.
"""

import re
import unicodedata
from collections.abc import Collection, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication loses no bits of a hash
_NON_ASCII = re.compile(r"[^\x00-\x7f]+")
_ZEROS = re.compile(rb"0+")
# prefixes of Unicode letter names in scripts without spaces between words
_NO_BLANKS = ("CJK ", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR")


class _Replacements(dict[int, str]):
    """Replacement of each character of a lower-case text, filled on demand."""

    def __init__(self, *, mask_digits: bool) -> None:
        super().__init__()
        self.mask_digits = mask_digits

    def __missing__(self, code: int) -> str:
        char = chr(code)
        category = unicodedata.category(char)
        replacement = " "
        if category[0] == "L":
            replacement = f" {char} " if unicodedata.name(char, "").startswith(_NO_BLANKS) else char
        elif category[0] == "M":
            replacement = char
        elif category[0] == "N":
            replacement = "0" if self.mask_digits else char
        elif category == "Cf":  # soft hyphens and joiners occur inside words
            replacement = ""
        self[code] = replacement
        return replacement

    def ascii_table(self) -> bytes:
        """Return a table for `bytes.translate` that lowers ASCII letters and keeps UTF-8 sequences."""
        return b"".join(self[ord(chr(code).lower())].encode() for code in range(128)) + bytes(range(128, 256))


_REPLACEMENTS = {mask_digits: _Replacements(mask_digits=mask_digits) for mask_digits in (False, True)}
_ASCII_TABLES = {mask_digits: table.ascii_table() for mask_digits, table in _REPLACEMENTS.items()}


def split_words(text: str, *, mask_digits: bool = True) -> list[bytes]:
    """Return the words of a text in UTF-8; about 40 MB/s for ASCII.

    Words are runs of letters, marks and digits in NFC and lower case, separated by everything else. In scripts without
    spaces (Chinese, Japanese, Thai and others) each letter is a word.

    Args:
        text: Any text, lone surrogates included.
        mask_digits: Replace each run of digits by one 0, so that texts that differ only in dates or counters are equal.
    """
    if not text.isascii():
        table = _REPLACEMENTS[mask_digits]
        text = unicodedata.normalize("NFC", text.lower())
        text = _NON_ASCII.sub(lambda match: match[0].translate(table), text)
    simple = text.encode().translate(_ASCII_TABLES[mask_digits])
    return (_ZEROS.sub(b"0", simple) if mask_digits else simple).split()


def hash_words(words: Sequence[bytes]) -> Hashes:
    """Return the XXH3 hash of each word, [W]."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, words), np.uint64, len(words))


def hash_ngrams(word_hashes: Hashes, lengths: Collection[int]) -> dict[int, Hashes]:
    """Return the n-gram hashes for each length n, indexed by first word, [max(0, W - n + 1)].

    A hash is a polynomial in a fixed multiplier modulo 2^64, with the word hashes as coefficients. All lengths together
    cost as much as the longest.
    """
    hashes = word_hashes
    found: dict[int, Hashes] = {}
    for length in range(1, max(lengths) + 1):
        if length > 1:
            hashes = hashes[:-1] * MULTIPLIER + word_hashes[length - 1 :]  # [W - length + 1], or [0]
        if length in lengths:
            found[length] = hashes
    return found
