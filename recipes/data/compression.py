"""Recognize a compressed file by its first bytes, and write commands that read a file whatever its name is."""

from pathlib import Path

from recipes.errors import shell

# long enough that no raw tokens begin with them by chance
_COMMANDS = {
    b"\x1f\x8b\x08": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
_BZIP2_BLOCK = b"1AY&SY"  # after "BZh" and a digit
_NUM_HEAD_BYTES = 16
NEW_FILE = "> <new file>, then its path"


def find_compression(head: bytes) -> str | None:
    """Return how a file is compressed by its first bytes: "gzip", "bzip2", "xz" or "zstd"."""
    for magic, (name, _) in _COMMANDS.items():
        if head.startswith(magic) and (name != "bzip2" or head[4:].startswith(_BZIP2_BLOCK)):
            return name
    return None


def unpack(path: Path | str, compression: str) -> str:
    """Return the command that unpacks a file; from its standard input, as the tools refuse what has another suffix."""
    return f"{shell(f'{dict(_COMMANDS.values())[compression]} <', path)} {NEW_FILE}"


def convert(command: str, path: Path | str) -> str:
    """Return what to type to convert a file, unpacked if it is compressed, with a command that reads standard input."""
    try:
        with open(path, "rb") as file:
            compression = find_compression(file.read(_NUM_HEAD_BYTES))
    except (OSError, ValueError):  # it is in a store, or gone
        compression = None
    if compression is None:
        return f"{shell(f'{command} <', path)} {NEW_FILE}"
    return f"{shell(f'{dict(_COMMANDS.values())[compression]} <', path)} | {command} {NEW_FILE}"
