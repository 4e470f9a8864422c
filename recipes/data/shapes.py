"""Scenes of one to three shapes: what is in them, their pictures, and which of them are never trained on.

A shape has a color, a form and a place. Ten of the 96 combinations of the three are unseen, such as a blue circle at
the top left: no scene of training has one of them, and each scene of the validation at least one.

Shapes: S x S pixels, H pixels a side of a place.
"""

import hashlib
import itertools
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from recipes.data.draws import rng_at
from recipes.errors import ConfigError

COLORS = {
    "red": (220, 45, 45),
    "green": (45, 175, 65),
    "blue": (60, 85, 235),
    "yellow": (235, 210, 60),
    "purple": (160, 60, 190),
    "white": (235, 235, 235),
}
PLACES = ("top left", "top right", "bottom left", "bottom right")
MOST_SHAPES = 3
_NUM_UNSEEN = 10  # of the combinations
_SMALLEST, _LARGEST = 0.26, 0.4  # half the width of a shape, in parts of the side of a place
_BRIGHTEST = 50.0  # background, of 255
_SHIFT = 20.0  # of each channel of a color, up or down
NUM_UNSEEN_SCENES = 512  # of the validation
SEEDS = {"train": 0, "val": 1}  # of what is in a scene
# of its picture: numbers drawn twice would tell by the brightness of training how many shapes there are
PICTURE_SEEDS = {"train": 5, "val": 6}
_ARM = 0.36  # half the width of an arm of a cross, in parts of half the width of the cross

Offsets = NDArray[np.float32]
# distance of pixels to the edge of each form, below 0 inside, by their offsets from its center, to the right [H] and
# down [H, 1], and half its width
FORMS: dict[str, Callable[[Offsets, Offsets, float], Any]] = {
    "circle": lambda x, y, size: np.sqrt(x * x + y * y) - size,
    "square": lambda x, y, size: np.maximum(abs(x), abs(y)) - size,
    "triangle": lambda x, y, size: np.maximum(y - size, (2 * abs(x) - y - size) / 5**0.5),
    "cross": lambda x, y, size: np.maximum(np.minimum(abs(x), abs(y)) - _ARM * size, np.maximum(abs(x), abs(y)) - size),
}


class Shape(NamedTuple):
    """One shape of a scene."""

    color: str
    form: str
    place: str


Scene = tuple[Shape, ...]  # in the order of their places

_SHAPES = [Shape(*words) for words in itertools.product(COLORS, FORMS, PLACES)]


def _hash(shape: Shape) -> bytes:
    return hashlib.blake2b(" ".join(shape).encode(), digest_size=4).digest()


UNSEEN = frozenset(sorted(_SHAPES, key=_hash)[:_NUM_UNSEEN])


def is_unseen(scene: Scene) -> bool:
    """Return whether a scene is one of the validation: a shape in it is an unseen combination."""
    return not UNSEEN.isdisjoint(scene)


def write_caption(scene: Scene) -> str:
    """Return what is in a scene, such as `red circle top left, blue square bottom right`."""
    return ", ".join(" ".join(shape) for shape in scene)


def read_caption(caption: str) -> Scene:
    """Return the scene that `write_caption` has described."""
    return tuple(Shape(*part.split(" ", 2)) for part in caption.split(", "))


def list_scenes() -> list[Scene]:
    """Return all scenes there are, about 59,000."""
    kinds = [*itertools.product(COLORS, FORMS)]
    return [
        tuple(Shape(*kind, place) for kind, place in zip(chosen, places, strict=True))
        for number in range(1, MOST_SHAPES + 1)
        for places in itertools.combinations(PLACES, number)
        for chosen in itertools.product(kinds, repeat=number)
    ]


def choose_scene(rng: Generator, *, unseen: bool) -> Scene:
    """Return a scene of training or, `unseen`, of the validation.

    Of training, one, two and three shapes are about as frequent as each other.
    """
    while True:
        number = int(rng.integers(1, MOST_SHAPES + 1))
        places = sorted(rng.permutation(len(PLACES))[:number].tolist())
        kinds = rng.integers(len(COLORS) * len(FORMS), size=number).tolist()
        scene = tuple(_SHAPES[kind * len(PLACES) + place] for kind, place in zip(kinds, places, strict=True))
        if is_unseen(scene) == unseen:
            return scene


def choose_seen(number: int) -> list[Scene]:
    """Return scenes of training, always the same ones."""
    return [choose_scene(rng_at(SEEDS["train"], draw), unseen=False) for draw in range(number)]


def choose_unseen(number: int) -> list[Scene]:
    """Return different scenes of the validation, always the same ones."""
    found: dict[Scene, None] = {}
    draws = (choose_scene(rng_at(SEEDS["val"], draw), unseen=True) for draw in itertools.count())
    while len(found) < number:
        found[next(draws)] = None
    return [*found]


def check_image_size(image_size: int) -> None:
    """Check that pictures of a size can be drawn.

    Raises:
        ConfigError: It is odd.
    """
    if image_size % 2:
        reason = "the places are as large as each other, two in a row"
        raise ConfigError(f"data.image_size={image_size}", reason, f"data.image_size={image_size + 1}")


def draw_picture(scene: Scene, rng: Generator, image_size: int) -> NDArray[np.uint8]:
    """Return a picture of a scene, [S, S, 3], of which sizes, exact places and exact colors are drawn.

    Args:
        scene: What is in it.
        rng: Generator of the picture.
        image_size: S, an even number.
    """
    side = image_size // 2
    drawn = rng.random(1 + 6 * len(scene), dtype=np.float32)
    picture = np.full((image_size, image_size, 3), _BRIGHTEST * drawn[0], dtype=np.float32)
    pixels = np.arange(side, dtype=np.float32) + np.float32(0.5)  # [H]
    for shape, (width, x, y, *shift) in zip(scene, drawn[1:].reshape(-1, 6).tolist(), strict=True):
        size = (_SMALLEST + (_LARGEST - _SMALLEST) * width) * side
        room = side - 2 * size
        distance = FORMS[shape.form](pixels - (size + room * x), pixels[:, None] - (size + room * y), size)  # [H, H]
        covered = np.maximum(np.minimum(0.5 - distance, 1.0), 0.0)[..., None]  # [H, H, 1], 1 inside
        color = [
            min(max(channel + _SHIFT * (2 * part - 1), 0.0), 255.0)
            for channel, part in zip(COLORS[shape.color], shift, strict=True)
        ]
        row, column = divmod(PLACES.index(shape.place), 2)
        place = picture[row * side : (row + 1) * side, column * side : (column + 1) * side]  # [H, H, 3]
        place += covered * (np.array(color, dtype=np.float32) - place)
    return (picture + np.float32(0.5)).astype(np.uint8)


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return an image [H, W, 3] as a PNG file, compressed little."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each begins with its filter, 0: none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
