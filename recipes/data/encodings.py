"""Which encoding a text that is not UTF-8 is probably written in, where its bytes show it, and how to convert it."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes.data.compression import convert

_HALF = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")  # of a surrogate pair, as CESU-8 encodes it
UNKNOWN = "<encoding of the text, such as windows-1252 or gb18030>"
_SAMPLE_BYTES = 1 << 16
_WESTERN = frozenset("àâäçèéêëîïôöùûüßñáíóúåæøÀÂÄÇÈÉÊËÎÏÔÖÙÛÜÑÁÍÓÚÅÆØœŒ€\u2018\u2019“”\u2013—…«»°£§©®·¡ªº½\xa0")
_FREQUENT_RUSSIAN = frozenset("оеаинтсрвл")  # 60 % of the letters
_MIN_COMMON = 0.5


def guess_encoding(data: bytes) -> str | None:
    """Return the encoding of a text that is not UTF-8, by a name that iconv and Python know; None if it does not show.

    Args:
        data: The text, or a part of it.
    """
    return guess_wide_encoding(data) or _guess(data, _KINDS)


def guess_wide_encoding(data: bytes) -> str | None:
    """Return which of UTF-16 and UTF-32 a text without a byte order mark is in, which may be valid UTF-8; None if none.

    Args:
        data: The text, or a part of it from an offset that is a multiple of four.
    """
    return _guess(data, _WIDE_KINDS)


def _guess(data: bytes, kinds: Sequence[tuple[str, Callable[[str], bool]]]) -> str | None:
    data = data[:_SAMPLE_BYTES]
    for encoding, is_like in kinds:
        for num_cut in range(4):  # the last character may be cut
            try:
                text = data[: len(data) - num_cut].decode(encoding)
            except UnicodeDecodeError:
                continue
            if is_like(text):
                return encoding
            break
    return None


def describe_conversion(path: Path | str, encoding: str | None) -> str:
    """Return what to type to convert a text file, which may be compressed, to UTF-8."""
    return convert(f"iconv -f {encoding or UNKNOWN} -t utf-8", path)


def explain_not_utf8(path: Path | str, error: UnicodeDecodeError, *, start: int = 0) -> tuple[str, str]:
    """Return why a text is not UTF-8, and what to type; `start` is the file offset of the decoded bytes."""
    place, data = start + error.start, error.object
    if is_cut(error):
        fix = f"{convert(f'head -c {place}', path)}, or a complete copy"
        return f"it ends within a character, at byte {place}: it is truncated", fix
    reason = f"byte {place} is not UTF-8 text ({error.reason})"
    if _HALF.match(data, error.start):
        text = "sys.stdin.buffer.read().decode('utf-8', 'surrogatepass').encode('utf-16', 'surrogatepass')"
        code = f"import sys; sys.stdout.buffer.write({text}.decode('utf-16', 'replace').encode())"
        return f"{reason}, but half of a surrogate pair: it is CESU-8", convert(f'python -c "{code}"', path)
    replaced = data[max(0, error.end - _SAMPLE_BYTES) :][: 2 * _SAMPLE_BYTES].decode("utf-8", "replace")
    num_bad, num_others = replaced.count("\ufffd"), sum(not letter.isascii() for letter in replaced)
    if num_others > 2 * num_bad:  # of the letters that are not ASCII, most are UTF-8
        return reason, f"{convert('iconv -c -f utf-8 -t utf-8', path)}; it leaves out such bytes"
    encoding = guess_encoding(data)
    reason += "" if encoding is None else f"; it looks like {encoding}"
    return reason, describe_conversion(path, encoding)


def is_cut(error: UnicodeDecodeError) -> bool:
    """Return whether all is UTF-8 but the last character, which is not complete."""
    return error.end == len(error.object) and error.reason == "unexpected end of data"


def _share(letters: Sequence[str], is_one: Callable[[str], bool]) -> float:
    return sum(map(is_one, letters)) / max(1, len(letters))


def _has(is_one: Callable[[str], bool], *, min_share: float) -> Callable[[str], bool]:
    """Return whether a text has a share of some letters, among those that are not ASCII.

    They must be no exceptions in it: two of any encoding happen to be letters of others.
    """

    def is_like(text: str) -> bool:
        letters = [letter for letter in text if not letter.isascii()]
        return len(letters) > len(text) // 4 and _share(letters, is_one) >= min_share

    return is_like


def _is_among_first(encoding: str, last: int) -> Callable[[str], bool]:
    """Return whether a character is one of those that an encoding lists by their frequency, before all others."""

    def is_one(letter: str) -> bool:
        first = letter.encode(encoding, "replace")[0]
        return 0xA4 <= first <= last

    return is_one


def _is_western(text: str) -> bool:
    letters = [letter for letter in text if not letter.isascii()]
    return 0 < len(letters) < len(text) / 3 and all(letter in _WESTERN for letter in letters)


def _is_wide(text: str) -> bool:
    """Return whether it is one script with blanks or punctuation: ASCII letters in pairs are Chinese as UTF-16."""
    num_of_one = max(sum(ord(letter) in script for letter in text) for script in _SCRIPTS)
    is_readable = all(letter.isprintable() or letter in "\n\r\t" for letter in text)
    num_marks = sum(letter in " \n,.、。\uff0c" for letter in text)
    return is_readable and num_of_one >= _MIN_COMMON * len(text) and num_marks > len(text) // 100


# Latin; Greek to Hebrew; kana; Chinese; Korean
_SCRIPTS = (
    range(0x20, 0x250),
    range(0x370, 0x600),
    range(0x3000, 0x3100),
    range(0x4E00, 0xA000),
    range(0xAC00, 0xD7B0),
)
_WIDE_KINDS = [(encoding, _is_wide) for encoding in ("utf-32le", "utf-32be", "utf-16le", "utf-16be")]
_IS_JAPANESE = _has(lambda letter: "\u3041" <= letter <= "\u30ff", min_share=0.2)  # kana
_IS_RUSSIAN = _has(lambda letter: letter in _FREQUENT_RUSSIAN, min_share=_MIN_COMMON)
_KINDS = [
    ("cp932", _IS_JAPANESE),
    ("euc-jp", _IS_JAPANESE),
    ("cp949", _has(lambda letter: "가" <= letter <= "힣" or letter in "、。·…\u2018\u2019“”", min_share=0.95)),
    ("gb18030", _has(_is_among_first("gb2312", 0xD7), min_share=_MIN_COMMON)),
    ("big5", _has(_is_among_first("big5", 0xC6), min_share=0.75)),
    ("windows-1251", _IS_RUSSIAN),
    ("koi8-r", _IS_RUSSIAN),
    ("windows-1252", _is_western),
]
