"""Small captioned images, and data sources of them, for tests of images with text."""

import csv
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformed_images import make_transform

from recipes.data.image_text import ImageText
from recipes.tokenizer.bytes import Bytes

COLORS = ("red", "green", "blue", "gray")
SHAPES = ("disc", "square", "cross")
SEQ_LEN = 24


def encode_noise(seed: int) -> bytes:
    """Return a PNG of 10 x 12 random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(256, size=(12, 10, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def caption_each(num_images: int, *, num_captions: int = 2) -> list[list[str]]:
    """Return different captions of each image."""
    kinds = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
    return [
        [f"a {kinds[number % len(kinds)]} {number}.{which}" for which in range(num_captions)]
        for number in range(num_images)
    ]


def write_images(folder: Path, num_images: int) -> list[str]:
    """Write images; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number}.png" for number in range(num_images)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(encode_noise(number))
    return names


def write_csv(path: Path, rows: Iterable[Sequence[str]]) -> Path:
    """Write a table of images and captions, with images of that many rows beside it unless they are there."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
    return path


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def make_source(path: Path | str, **settings: Any) -> ImageText:
    """Return a source whose tokens are bytes."""
    known: dict[str, Any] = {
        "path": str(path),
        "image": "image",
        "caption": "caption",
        "val_path": None,
        "split": "train",
        "val_split": None,
        "val_fraction": 0.25,
        "tokenizer": Bytes(),
        "seq_len": SEQ_LEN,
        "transform": make_transform(flip=0.0),
        "on_bad_image": "error",
        "cache_dir": str(Path(path).parent / "cache"),
        "vocab_size": None,
    }
    return ImageText(**known | settings)
