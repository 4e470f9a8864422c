"""Images as people have them: every mode of Pillow becomes upright 8-bit gray or RGB; hostile files end soon."""

import io
import resource
import struct
import time
import zlib

import numpy as np
import pytest
import torch

from recipes.data.image_file import MAX_PIXELS, BadImageError, decode, read_file

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # pytest shows those that `import_pillow` hides
PIL = pytest.importorskip("PIL.Image")


def encoded(image, kind, **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def pixels(image, kind, channels=3, **settings):
    """Return the pixels of an image that is saved and read: [H, W, C] as nested lists, without an axis of one."""
    read = decode(encoded(image, kind, **settings), channels)
    assert read.dtype == torch.uint8
    return read.permute(1, 2, 0).squeeze(-1).tolist()


RED, GREEN, BLUE, WHITE = [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]


def two_pixels(mode, first, second):
    image = PIL.new(mode, (2, 1))
    image.putpixel((0, 0), first)
    image.putpixel((1, 0), second)
    return image


def test_a_gray_image_has_three_equal_channels_or_one():
    image = two_pixels("L", 7, 200)
    assert pixels(image, "PNG") == [[[7] * 3, [200] * 3]]
    assert pixels(image, "PNG", channels=1) == [[7, 200]]


def test_a_palette_is_looked_up():
    image = PIL.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    assert pixels(image, "PNG") == [[RED, BLUE]]
    assert pixels(image, "GIF") == [[RED, BLUE]]


def test_what_is_transparent_is_white_and_half_of_it_is_between():
    assert pixels(two_pixels("RGBA", (255, 0, 0, 0), (0, 0, 255, 255)), "PNG") == [[WHITE, BLUE]]
    assert pixels(two_pixels("RGBA", (0, 0, 0, 128), (0, 0, 0, 255)), "PNG") == [[[127] * 3, [0] * 3]]
    assert pixels(two_pixels("LA", (9, 0), (9, 255)), "PNG") == [[WHITE, [9] * 3]]
    palette = PIL.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert pixels(palette, "PNG", transparency=0) == [[WHITE, BLUE]]


def test_16_bits_become_8_over_their_whole_range():
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    assert pixels(PIL.fromarray(values), "PNG", channels=1) == [[0, 1, 128, 255]]
    assert pixels(PIL.fromarray(values), "TIFF", channels=1) == [[0, 1, 128, 255]]
    assert pixels(PIL.fromarray(values), "PNG") == [[[0] * 3, [1] * 3, [128] * 3, [255] * 3]]
    big_endian = b"P5 4 1 65535\n" + values.astype(">u2").tobytes()
    assert decode(big_endian, 1).tolist() == [[[0, 1, 128, 255]]]
    tiff = PIL.frombytes("I;16B", (4, 1), values.astype(">u2").tobytes())
    assert pixels(tiff, "TIFF", channels=1) == [[0, 1, 128, 255]]


def test_floats_are_0_to_1_and_nan_is_black():
    values = np.array([[0, 0.5, 1, 2, np.nan]], dtype=np.float32)
    assert pixels(PIL.fromarray(values), "TIFF", channels=1) == [[0, 128, 255, 255, 0]]


def test_a_large_image_is_converted_in_bands_that_fit_together(monkeypatch):
    colors = np.random.default_rng(0).integers(256, size=(23, 9, 3), dtype=np.uint8)
    palette = PIL.fromarray(colors).quantize(16)
    found = [encoded(PIL.fromarray(colors), "PNG"), encoded(palette, "PNG", transparency=3)]
    whole = [decode(data, 3) for data in found]
    monkeypatch.setattr("recipes.data.image_file._BAND_PIXELS", 40)
    assert torch.equal(whole[0], torch.from_numpy(colors).permute(2, 0, 1))
    assert all(torch.equal(decode(data, 3), image) for data, image in zip(found, whole, strict=True))


def test_1_bit_is_black_and_white():
    assert pixels(two_pixels("1", 0, 1), "PNG") == [[[0] * 3, WHITE]]
    assert pixels(two_pixels("1", 0, 1), "TIFF", channels=1) == [[0, 255]]


def test_cmyk_is_converted_to_rgb():
    image = PIL.new("CMYK", (8, 8), (0, 255, 255, 0))  # magenta and yellow ink: red
    red = np.array(pixels(image, "JPEG", quality=100))
    assert np.abs(red - RED).max() <= 2
    assert np.array(pixels(image, "TIFF")).tolist() == [[RED] * 8] * 8


# the same picture, R over GB, as cameras store it in each of the eight positions
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_tag_says(orientation):
    upright = np.array([[RED, WHITE, WHITE], [GREEN, WHITE, BLUE]], dtype=np.uint8)
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    stored = PIL.fromarray(np.ascontiguousarray(undo[orientation](upright)))
    exif = PIL.Exif()
    exif[0x0112] = orientation
    for kind in ("PNG", "TIFF", "WEBP"):
        settings = {"lossless": True} if kind == "WEBP" else {}
        assert pixels(stored, kind, exif=exif, **settings) == upright.tolist(), kind


def test_damaged_metadata_leave_the_pixels_as_they_are():
    exif = b"Exif\0\0II*\0\xff\xff\xff\x7f" + b"\xff" * 30
    image = PIL.new("RGB", (3, 2), (10, 20, 30))
    assert pixels(image, "PNG", exif=exif) == [[[10, 20, 30]] * 3] * 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_read(kind):
    frames = [PIL.new("RGB", (2, 2), color) for color in ("red", "lime", "blue")]
    settings = {"lossless": True} if kind == "WEBP" else {}
    found = pixels(frames[0], kind, save_all=True, append_images=frames[1:], **settings)
    assert found == [[RED] * 2] * 2


def test_the_content_and_not_the_name_says_what_a_file_is(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(encoded(PIL.new("RGB", (2, 2), "red"), "PNG"))
    assert decode(read_file(path), 3).shape == (3, 2, 2)


def test_strides_are_those_that_torchvision_resizes_fastest():
    assert decode(encoded(PIL.new("RGB", (5, 4)), "PNG"), 3).stride() == (1, 15, 3)


def png_of(width, height, *, chunks=b"", bits=8, kind=2):
    """Return the head of a PNG of any size, and an end without rows."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
    texts = b"".join(chunk(name, content) for name, content in chunks or ())
    return b"\x89PNG\r\n\x1a\n" + head + texts + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def bmp_of(width, height, *, body=b"", compression=0):
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, compression, 0, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(body), 0, 0, 54 + 1024) + head + bytes(1024) + body


def tiff_with_tiles(side):
    """Return a TIFF of one pixel, whose only tile has this many pixels of a side, all of them compressed zeros."""
    tile = zlib.compress(bytes(1 << 16)) + bytes(64)
    tags = [(256, 1), (257, 1), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side), (324, 200)]
    tags += [(325, len(tile))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    ifd = struct.pack("<H", len(tags)) + entries + bytes(4)
    return (b"II*\0" + struct.pack("<I", 8) + ifd).ljust(200, b"\0") + tile


def jpeg_with_passes(num_passes):
    """Return a progressive JPEG whose last pass is repeated."""
    data = encoded(PIL.new("RGB", (2048, 2048)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * num_passes + data[-2:]


def bombs():
    """Return files of a few kB that ask for gigabytes or minutes."""
    text = zlib.compress(bytes(1 << 26))
    return {
        "pixels of a PNG": png_of(100_000, 100_000),
        "a PNG of one row": png_of(2_000_000_000, 1),
        "pixels of a BMP": bmp_of(30_000, 30_000),
        "skipped rows of a BMP": bmp_of(MAX_PIXELS, 1, body=b"\0\2\0\xff" * 64, compression=1),
        "a text of a PNG": png_of(4, 4, chunks=[(b"zTXt", b"a\0\0" + text)]),
        "a color profile of a PNG": png_of(4, 4, chunks=[(b"iCCP", b"a\0\0" + text)]),
        "tiles of a TIFF": tiff_with_tiles(1 << 16),
        "passes of a JPEG": jpeg_with_passes(2000),
        "a PGM of digits": b"P2 20000 6000 255\n" + b"1 " * 1000,
        "a PPM of 10 bits": b"P6 8000 8000 1023\n" + bytes(1000),
        "a screen of a GIF": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + bytes(9),
        "no byte": b"",
        "a web page": b"<!doctype html><html>not found</html>",
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100000 100000\nshowpage\n",
    }


def test_bombs_end_soon_and_take_little_memory():
    found = bombs()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, data in found.items():
        began = time.monotonic()
        with pytest.raises(BadImageError):
            decode(data, 3)
        assert time.monotonic() - began < 1.0, name
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_a_bad_image_says_what_is_wrong():
    whole = encoded(PIL.new("RGB", (64, 64)), "PNG", compress_level=0)
    for data, said in (
        (b"", "it is empty (0 bytes)"),
        (b"hello", "it is none of BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP"),
        (whole[:500], "it is damaged: image file is truncated"),
        (png_of(12_000, 12_000), "12000 x 12000 pixels are more than 134,217,728, or 65,535 of a side"),
        (png_of(20_000, 20_000), "it has more than 134,217,728 pixels"),
    ):
        with pytest.raises(BadImageError) as caught:
            decode(data, 3)
        assert str(caught.value).startswith(said), data[:20]


def test_a_pipe_is_no_image(tmp_path):
    import os

    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(BadImageError, match="pipe"):
        read_file(tmp_path / "a.jpg")


def test_a_video_behind_a_photo_adds_no_passes():
    image = PIL.new("RGB", (2000, 1500), (200, 10, 10))
    photo = encoded(image, "JPEG")
    found = decode(photo + b"\xff\xda" * 4000, 3)
    assert found.shape == (3, 1500, 2000)
