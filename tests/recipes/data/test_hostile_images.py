"""Damaged and hostile images by the thousand: each is an image or an error, within a second and a bounded memory."""

import io
import os
import random
import resource
import struct
import time
import zlib

import pytest

from recipes.data.image_file import BadImageError, decode

PIL = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore:::PIL")
NUM_QUICK, NUM_LONG = 150, 20_000
MAX_MIB = 1100  # above what is used before: an RGB image of the most pixels, twice, as it is converted
MAX_SECONDS = 30.0  # of one file, on a busy core: the most pixels are 134 million
SAVED = (
    ("JPEG", {"quality": 90}),
    ("JPEG", {"progressive": True, "quality": 40}),
    ("PNG", {}),
    ("PNG", {"compress_level": 0}),
    ("GIF", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("BMP", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    ("TIFF", {"compression": "tiff_deflate"}),
    ("TIFF", {"compression": "jpeg"}),
    ("PPM", {}),
)


def encode_all():
    """Return whole images of every format and many modes, some with metadata or several frames."""
    rng = random.Random(0)
    found = []
    exif = PIL.Exif()
    exif[0x0112], exif[0x010E] = 6, "a text " * 40
    for kind, settings in SAVED:
        for mode in ("RGB", "L", "RGBA", "P", "1", "CMYK", "I;16", "LA", "F"):
            width, height = rng.choice([(31, 17), (64, 64), (200, 3)])
            image = PIL.frombytes("L", (width, height), rng.randbytes(width * height)).resize((width, height))
            image = (
                image.convert("RGB").convert(mode) if mode not in ("I;16", "F") else image.convert("I").convert(mode)
            )
            for more in ({}, {"exif": exif}, {"save_all": True, "append_images": [image] * 3}):
                file = io.BytesIO()
                try:
                    image.save(file, kind, **settings, **more)
                except (OSError, ValueError, KeyError, TypeError):  # the format has no such mode
                    continue
                found.append(file.getvalue())
    return found


def damage(data, others, rng):
    """Return a file that is cut, changed, of another kind than it begins like, or claims what it has not."""
    how = rng.randrange(9)
    changed = bytearray(data)
    if how == 0:
        return data[: rng.randrange(len(data))]
    if how == 1:  # some bits, anywhere
        for _ in range(rng.choice([1, 3, 30])):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if how == 2:  # numbers in the header as large as they can be
        place = rng.randrange(min(len(data), 64))
        changed[place : place + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\1\0\0", b"\0\0\0\0"])
        return bytes(changed)
    if how == 3:  # a hole
        begin = rng.randrange(len(data))
        return data[:begin] + bytes(rng.randrange(200)) + data[begin + rng.randrange(200) :]
    if how == 4:  # the end of another
        return data[: rng.randrange(len(data))] + rng.choice(others)[rng.randrange(20) :]
    if how == 5:  # the same part many times
        begin = rng.randrange(len(data))
        return data[:begin] + data[begin : begin + 300] * rng.choice([2, 50, 500]) + data[begin:]
    if how == 6:
        return rng.choice(others)[:12] + rng.randbytes(rng.randrange(2000))
    if how == 7:
        return bomb(data, rng)
    return rng.choice([b"", b"\0" * 5000, b"<html>404</html>", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", data + data])


def bomb(data, rng):
    """Return a header with a size that a few bytes cannot have, right checksum included."""
    width, height = (rng.choice([1, 500, 11_000, 40_000, 65_535, 1 << 20, (1 << 31) - 1]) for _ in range(2))
    if data[:4] == b"\x89PNG":
        head = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
        return data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]
    if data[:2] == b"\xff\xd8":
        for marker in (b"\xff\xc0", b"\xff\xc2"):
            if (at := data.find(marker)) > 0:
                return data[: at + 5] + struct.pack(">HH", height & 0xFFFF, width & 0xFFFF) + data[at + 9 :]
    if data[:2] == b"BM":
        return data[:18] + struct.pack("<ii", width, rng.choice([1, -1]) * height) + data[26:]
    if data[:3] == b"GIF":
        return data[:6] + struct.pack("<HH", width & 0xFFFF, height & 0xFFFF) + data[10:]
    if data[:2] in (b"P5", b"P6"):
        return data[:3] + f"{width} {height}\n255\n".encode() + data[20:]
    if data[:4] == b"RIFF" and data[12:16] == b"VP8X":
        return data[:24] + struct.pack("<I", width)[:3] + struct.pack("<I", height)[:3] + data[30:]
    return data.replace(struct.pack("<H", 64), struct.pack("<H", width & 0xFFFF))


def decode_damaged(num_files, seed):
    """Decode files; return how many were images and not, the slowest in seconds, and the memory used in MiB."""
    rng = random.Random(seed)
    whole = encode_all()
    for data in whole:
        decode(data, 3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_images, slowest, reasons = 0, (0.0, -1), {}
    for number in range(num_files):
        data = damage(rng.choice(whole), whole, rng)
        began = time.monotonic()
        try:
            image = decode(data, rng.choice([1, 3]))
            assert image.ndim == 3
            num_images += 1
        except BadImageError as error:
            reasons[str(error).partition(":")[0]] = reasons.get(str(error).partition(":")[0], 0) + 1
        slowest = max(slowest, (time.monotonic() - began, number))
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{num_images} of {num_files} are images; slowest {slowest[0]:.2f} s (file {slowest[1]}); {used:.0f} MiB")
    return num_images, slowest[0], used


def test_a_hundred_and_fifty_damaged_images_end_as_an_image_or_an_error():
    num_images, seconds, mib = decode_damaged(NUM_QUICK, seed=0)
    assert 0 < num_images < NUM_QUICK
    assert seconds < MAX_SECONDS
    assert mib < MAX_MIB


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("LONG_TESTS" not in os.environ, reason="set by `make test-long`")
def test_twenty_thousand_damaged_images_end_as_an_image_or_an_error():
    num_images, seconds, mib = decode_damaged(NUM_LONG, seed=1)
    assert 0 < num_images < NUM_LONG
    assert seconds < MAX_SECONDS
    assert mib < MAX_MIB


if __name__ == "__main__":
    decode_damaged(NUM_LONG, seed=1)
