"""Recognize a file of another kind than the one expected by its first bytes, and say how to convert it."""

import codecs
import json
import re
from dataclasses import dataclass
from pathlib import Path

from recipes.data.compression import convert, find_compression, unpack
from recipes.data.encodings import describe_conversion, guess_encoding, guess_wide_encoding
from recipes.errors import shell, type_setting

NUM_HEAD_BYTES = 4096  # enough for the header of a .npy file
NPY, PARQUET, _ARROW, _ZIP, _PDF = b"\x93NUMPY", b"PAR1", b"ARROW1", b"PK\x03\x04", b"%PDF"
_LZ4 = b"\x04\x22\x4d\x18"
_ARROW_STREAM = b"\xff\xff\xff\xff"  # before the length of its schema, a multiple of 8
_MAX_SCHEMA_BYTES = 1 << 26
# zip archives of a document: suffixes, a part of the name of a member, and what to type
_OFFICE = {
    "a spreadsheet": (
        (".xlsx", ".xlsm", ".ods"),
        (b"xl/", b"opendocument.spreadsheet"),
        "<its sheet as JSONL, as to_json(…, orient='records', lines=True) of pandas writes it>, with data=documents",
    ),
    "a document of a word processor": (
        (".docx", ".odt", ".epub"),
        (b"word/", b"mimetypeapplication/"),
        "<its text as UTF-8, as pandoc -t plain writes it>",
    ),
}

# too short to be recognized without the name
_COMPRESSED_BY_NAME = {
    (".lzma", b"\x5d\x00\x00"): ("lzma", "unlzma"),
    (".z", b"\x1f\x9d"): ("compress (.Z)", "gunzip"),
}
_OTHERS = {
    NPY: "an array of NumPy (.npy)",
    PARQUET: "a Parquet file",
    b"PARE": "a Parquet file that is encrypted",
    _ARROW: "an Arrow file",
    b"FEA1": "a Feather file of version 1",
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    _ZIP: "a zip archive, such as an .npz or a checkpoint",
    b"PK\x05\x06": "an empty zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    _LZ4: "compressed with lz4",
    b"GGUF": "a GGUF file, which holds the weights of a model",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9": "a checkpoint of PyTorch",
    b"\x80\x03}": "a pickle",
    b"\x80\x04\x95": "a pickle",
    b"\x80\x05\x95": "a pickle",
    b"\x89HDF": "an HDF5 file",
    b"MMIDIDX\x00": "the index of a Megatron dataset, whose tokens are in the .bin file beside it",
    b"SQLite format 3": "a SQLite database",
    _PDF: "a PDF",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"II*\x00": "a TIFF image",
    b"MM\x00*": "a TIFF image",
    b"RIFF": "a RIFF file, such as a WAV or a WebP",
    b"\x7fELF": "a program",
}
_MAX_SAFETENSORS_HEADER = 100_000_000  # bytes, whose number is in the first eight
_TAR, _TAR_OFFSET = b"ustar", 257
_POINTER = b"version https://git-lfs"
# the longer ones first: a mark of UTF-32 begins with one of UTF-16
_WIDE_MARKS = {
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
_MIN_TEXT_BYTES = 32  # fewer may look like text by chance
_MIN_OTHER_TEXT_BYTES = 512  # in an encoding that is guessed
OTHER_ENCODING = "another encoding"
_ROW = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:')
_MIN_CONTROL = 16  # one in so many bytes of UTF-16 is a control character in ASCII, of most languages every second one


@dataclass(frozen=True)
class FileKind:
    """What a file is.

    Attributes:
        reason: "it is …", for an error.
        fix: What to type to convert it; None: nothing can be typed.
    """

    reason: str
    fix: str | None


def recognize(head: bytes, path: Path | str, *, is_text: bool, setting: str = "data.path") -> FileKind | None:
    """Return the kind of a file that is neither UTF-8 text nor raw tokens; None if it may be.

    Args:
        head: First bytes, `NUM_HEAD_BYTES` of them if there are as many.
        path: For the commands in `fix`.
        is_text: Whether text is expected. Raw tokens may look like text with two bytes per character.
        setting: Config key of the path, for `fix`.
    """
    if head.startswith(_POINTER):
        reason = "it is a Git LFS pointer: the file itself was not downloaded"
        return FileKind(reason, f"{shell('git -C', Path(path).parent)} lfs pull, then the same command")
    if (name := find_compression(head)) is not None:
        return FileKind(f"it is compressed with {name}", unpack(path, name))
    for (suffix, magic), (name, command) in _COMPRESSED_BY_NAME.items():
        if str(path).lower().endswith(suffix) and head.startswith(magic):
            return FileKind(f"it is compressed with {name}", convert(command, path))
    if head[_TAR_OFFSET : _TAR_OFFSET + len(_TAR)] == _TAR:
        return FileKind("it is a tar archive", f"{setting}=<a file that is unpacked from it>")
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            return _find_fix(magic, name, head, path, setting) if is_text else FileKind(f"it is {name}", None)
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER:
        return FileKind("it is a safetensors file, which holds the weights of a model", None)
    if is_text and is_table(head):
        return _find_fix(_ARROW, "an Arrow stream", head, path, setting)
    if is_text and (encoding := _find_wide_encoding(head)) is not None:
        return FileKind(f"it is {encoding.upper()} text", describe_conversion(path, encoding))
    return None


def is_table(head: bytes) -> bool:
    """Return whether a file is one of rows and columns: Parquet or Arrow, as a file or a stream."""
    length = int.from_bytes(head[4:8], "little")
    is_stream = head.startswith(_ARROW_STREAM) and length % 8 == 0 and 0 < length < _MAX_SCHEMA_BYTES
    return is_stream or head.startswith((PARQUET, _ARROW))


def _find_fix(magic: bytes, name: str, head: bytes, path: Path | str, setting: str) -> FileKind:
    """Return the kind of a file with what to type: the option that reads it, the command that converts it, or what."""
    fix = None
    if magic in (PARQUET, _ARROW):
        fix = f"data=documents {type_setting(setting, path)}, which reads its column text"
    elif magic == _LZ4:
        fix = convert("unlz4", path)
    elif magic == _PDF:
        fix = f"{setting}=<its text as UTF-8, as pdftotext writes it>"
    elif magic == _ZIP:
        fix = f"{setting}=<a file that is unpacked from it>"
        for kind, (suffixes, members, text) in _OFFICE.items():
            if str(path).lower().endswith(suffixes) or any(member in head for member in members):
                return FileKind(f"it is {kind}", f"{setting}={text}")
    return FileKind(f"it is {name}", fix)


def find_text_encoding(head: bytes) -> str | None:
    """Return the encoding of text where raw tokens are expected; None if it may be tokens.

    Text has no control characters. Tokens have them in every vocabulary: zero in the upper byte of those of a small
    one, and one byte in nine of the others.

    Returns:
        A name that iconv knows, or `OTHER_ENCODING`.
    """
    for mark, encoding in _WIDE_MARKS.items():
        if head.startswith(mark) and guess_wide_encoding(head[len(mark) :]) is not None:
            return encoding
    has_control = any((byte < 0x20 and not 0x09 <= byte <= 0x0D) or byte == 0x7F for byte in head)
    if has_control or len(head) < _MIN_TEXT_BYTES:
        return None
    if is_text(head):
        return "utf-8"
    return (guess_encoding(head) or OTHER_ENCODING) if len(head) >= _MIN_OTHER_TEXT_BYTES else None


def holds_rows(head: bytes, field: str | None = None) -> bool:
    """Return whether a text begins with rows: JSON objects of a line each, with names for their values.

    Args:
        head: First bytes.
        field: A field that a row has; one row alone without it may be a document. None: any.
    """
    lines = [line for line in head.removeprefix(codecs.BOM_UTF8).split(b"\n") if line.strip()]
    if not lines or not _ROW.match(lines[0]):
        return False
    is_cut = len(head) >= NUM_HEAD_BYTES and not head.endswith(b"\n")
    if is_cut and len(lines) == 1:
        return field is None or f'"{field}"'.encode() in lines[0]
    try:
        rows = [json.loads(line) for line in (lines[:-1] if is_cut else lines)[:2]]
    except (ValueError, RecursionError):
        return False
    is_rows = all(isinstance(row, dict) for row in rows)
    return is_rows and (field is None or field in rows[0] or len(rows) > 1)


def is_text(head: bytes) -> bool:
    """Return whether bytes begin a UTF-8 text; the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _find_wide_encoding(head: bytes) -> str | None:
    """Return the encoding of text with two or four bytes per character, with a byte order mark or without one."""
    for mark, encoding in _WIDE_MARKS.items():
        if head.startswith(mark):
            return encoding
    num_control = sum(byte < 0x09 or 0x0E <= byte < 0x20 for byte in head)
    is_long = len(head) >= _MIN_TEXT_BYTES
    return guess_wide_encoding(head) if is_long and num_control > len(head) // _MIN_CONTROL else None
