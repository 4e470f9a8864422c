"""Encode small images for a page, without a library. No Lightning."""

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence


def encode_png(rows: Sequence[bytes], *, num_channels: int) -> str:
    """Return an image as base64 of a PNG.

    Args:
        rows: One byte per channel and pixel, from the left, of each row from the top.
        num_channels: 3 for RGB, 1 for gray.
    """
    width = len(rows[0]) // num_channels
    head = struct.pack("!IIBBBBB", width, len(rows), 8, 2 if num_channels == 3 else 0, 0, 0, 0)
    # each row begins with its filter, 0: none
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    packed = (
        struct.pack("!I", len(data)) + name + data + struct.pack("!I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", head), (b"IDAT", pixels), (b"IEND", b""))
    )
    return b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(packed)).decode()
